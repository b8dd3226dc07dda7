"""Where requests wait for pages: bounded queues per tenant and model, with deadlines, served by weighted fair turns.

pipeline.py enters it; fleet.py calls `wake` when pages were freed, a snapshot arrived or a replica came up. Whose turn
it is is fairness.py's, whether a request fits the fleet's decision. Knows no engine and no money.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.errors import CapacityExceeded, Evicted, QueueFull
from gateway.fairness import Entry, FairQueue, QueueBounds
from gateway.waiting_forecast import WaitForecast

Want = TypeVar("Want")
Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class Turn:
    """Who waits, and what it is charged. tier: smaller goes first. cost_s: expected dominant seconds of a replica.

    tokens: of its prompt, which the queue bounds too.
    """

    tenant: str = ""
    tier: int = 0
    weight: float = 1.0
    cost_s: float = 1.0
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is before a request that is told to come again. entries: all that wait; seconds: work served before it."""

    tenant: str
    entries: int
    seconds: float


@dataclass(eq=False)
class _Waiter(Generic[Want, Place]):
    request_id: str
    want: Want
    ahead_s: float
    entered_at: float
    admitted: asyncio.Future[Place]


class WaitingRoom(Generic[Want, Place]):
    """The waiting requests of one model.

    try_place(request_id, want) takes the pages and returns the place they are held at, or None if they don't fit now.
    retry_after_s(want, ahead) says when a refused client should come again.
    """

    def __init__(
        self,
        *,
        bounds: QueueBounds,
        try_place: Callable[[str, Want], Place | None],
        give_back: Callable[[Place, str], None],
        retry_after_s: Callable[[Want, Ahead], int],
    ) -> None:
        self._try_place = try_place
        self._give_back = give_back
        self._retry_after_s = retry_after_s
        self._queue: FairQueue[_Waiter[Want, Place]] = FairQueue(bounds)
        self.forecast = WaitForecast()

    def __len__(self) -> int:
        return len(self._queue)

    async def place(
        self, request_id: str, want: Want, *, wait_s: float, reject_if_busy: bool, turn: Turn | None = None
    ) -> Place:
        """The place where the request's pages are now held.

        Raises CapacityExceeded (reject_if_busy, or it would not start in time), QueueFull or Evicted; nothing is held
        then. A cancelled caller leaves the queue at once.
        """
        turn = turn or Turn()
        loop = asyncio.get_running_loop()
        ahead_s = self._queue.ahead_s(turn.tenant, turn.tier, weight=turn.weight)
        waiter: _Waiter[Want, Place] = _Waiter(request_id, want, ahead_s, loop.time(), loop.create_future())
        entry = Entry(request_id, turn.tenant, turn.tier, turn.cost_s, turn.tokens, waiter, weight=turn.weight)
        if not len(self._queue):
            place = self._try_place(request_id, want)
            if place is not None:
                self._queue.push(entry)  # its tenant is charged, as if it had waited
                self._queue.serve(entry)
                return place
        if reject_if_busy or wait_s <= 0:
            raise CapacityExceeded("No capacity is free now.", retry_after_s=self._hint(waiter, turn))
        if self.forecast.learned and self.forecast.starts_in(ahead_s).p50_s > wait_s:
            raise CapacityExceeded(
                "The requests before this one take longer than it may wait.", retry_after_s=self._hint(waiter, turn)
            )
        if not self._queue.has_room(turn.tenant, turn.tier, turn.tokens):
            raise QueueFull(
                f"{len(self._queue)} requests are waiting for this model already.",
                retry_after_s=self._hint(waiter, turn),
            )
        self._queue.push(entry)
        return await self._wait(waiter, turn, wait_s)

    def correct(self, turn: Turn, seconds: float) -> None:
        """A request that was let in took so much more than it was charged; negative: less."""
        self._queue.correct(turn.tenant, turn.tier, seconds, weight=turn.weight)

    async def _wait(self, waiter: _Waiter[Want, Place], turn: Turn, wait_s: float) -> Place:
        try:
            async with asyncio.timeout(wait_s):
                return await waiter.admitted
        except TimeoutError:
            self._take_back(waiter)
            raise Evicted(
                f"The request waited {wait_s:.0f} s for capacity and left the queue at its deadline.",
                retry_after_s=self._hint(waiter, turn),
            ) from None
        except asyncio.CancelledError:
            self._take_back(waiter)
            raise
        finally:
            self._queue.remove(waiter.request_id)
            self.wake()

    def _hint(self, waiter: _Waiter[Want, Place], turn: Turn) -> int:
        seconds = self._queue.ahead_s(turn.tenant, turn.tier, weight=turn.weight)
        return self._retry_after_s(waiter.want, Ahead(turn.tenant, len(self._queue), seconds))

    def _take_back(self, waiter: _Waiter[Want, Place]) -> None:
        """The waiter leaves although it may just have been admitted: its pages go back."""
        if waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            self._give_back(waiter.admitted.result(), waiter.request_id)

    def refuse_all(self, error: Exception) -> None:
        """Everybody leaves with `error`: the process is shutting down."""
        for entry in self._queue:
            if not entry.item.admitted.done():
                entry.item.admitted.set_exception(error)

    def wake(self) -> None:
        """Admit whose turn it is for as long as it fits. A large head is not overtaken: it would starve."""
        while (entry := self._queue.head()) is not None:
            waiter = entry.item
            if waiter.admitted.done():
                self._queue.remove(entry.id)  # it is leaving
                continue
            place = self._try_place(waiter.request_id, waiter.want)
            if place is None:
                return
            self._queue.serve(entry)
            self.forecast.observe(waiter.ahead_s, asyncio.get_running_loop().time() - waiter.entered_at)
            waiter.admitted.set_result(place)
