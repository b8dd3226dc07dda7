"""Where a request waits for pages: a bounded first-in-first-out queue per model, with deadlines.

pipeline.py enters it; fleet.py calls `wake` when pages were freed, a snapshot arrived or a replica came up. Whether a
request fits is admission.py's decision; which replica is the fleet's. Knows no engine and no money.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.errors import CapacityExceeded, Evicted, QueueFull

Place = TypeVar("Place")


@dataclass(eq=False)
class _Waiter(Generic[Place]):
    request_id: str
    need: int
    admitted: asyncio.Future[Place]


class WaitingRoom(Generic[Place]):
    """FIFO of one model.

    try_place(request_id, need_pages) takes the pages and returns the place they are held at, or None if they don't fit
    now. retry_after_s(ahead, request_id) says when a refused client should come again. entries_max bounds the queue.
    """

    def __init__(
        self,
        *,
        entries_max: int,
        try_place: Callable[[str, int], Place | None],
        give_back: Callable[[Place, str], None],
        retry_after_s: Callable[[int, str], int],
    ) -> None:
        self._entries_max = entries_max
        self._try_place = try_place
        self._give_back = give_back
        self._retry_after_s = retry_after_s
        # A dict keeps order and lets a departing client leave the middle at once.
        self._waiters: dict[str, _Waiter[Place]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    async def place(self, request_id: str, need_pages: int, *, wait_s: float, reject_if_busy: bool) -> Place:
        """The place where the request's pages are now held.

        Raises CapacityExceeded (reject_if_busy, or no time left to wait), QueueFull or Evicted; nothing is held then.
        A cancelled caller leaves the queue at once.
        """
        if not self._waiters:
            place = self._try_place(request_id, need_pages)
            if place is not None:
                return place
        if reject_if_busy or wait_s <= 0:
            raise CapacityExceeded(
                "No capacity is free now.", retry_after_s=self._retry_after_s(len(self._waiters), request_id)
            )
        if len(self._waiters) >= self._entries_max:
            raise QueueFull(
                f"{len(self._waiters)} requests are waiting for this model already.",
                retry_after_s=self._retry_after_s(len(self._waiters), request_id),
            )
        return await self._wait(request_id, need_pages, wait_s)

    async def _wait(self, request_id: str, need_pages: int, wait_s: float) -> Place:
        waiter: _Waiter[Place] = _Waiter(request_id, need_pages, asyncio.get_running_loop().create_future())
        self._waiters[request_id] = waiter
        try:
            async with asyncio.timeout(wait_s):
                return await waiter.admitted
        except TimeoutError:
            self._take_back(waiter)
            raise Evicted(
                f"The request waited {wait_s:.0f} s for capacity and left the queue at its deadline.",
                retry_after_s=self._retry_after_s(len(self._waiters), request_id),
            ) from None
        except asyncio.CancelledError:
            self._take_back(waiter)
            raise
        finally:
            self._waiters.pop(request_id, None)
            self.wake()

    def _take_back(self, waiter: _Waiter[Place]) -> None:
        """The waiter leaves although it may just have been admitted: its pages go back."""
        if waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            self._give_back(waiter.admitted.result(), waiter.request_id)

    def refuse_all(self, error: Exception) -> None:
        """Everybody leaves with `error`: the process is shutting down."""
        for waiter in self._waiters.values():
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def wake(self) -> None:
        """Admit from the head for as long as the head fits. A large head is not overtaken: it would starve."""
        for waiter in list(self._waiters.values()):
            if waiter.admitted.done():
                continue
            place = self._try_place(waiter.request_id, waiter.need)
            if place is None:
                return
            del self._waiters[waiter.request_id]
            waiter.admitted.set_result(place)
