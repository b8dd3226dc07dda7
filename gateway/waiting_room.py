"""Where requests wait for pages: the asynchronous side of the door. Who enters, when and why not is door.py's.

model_fleet.py lets requests wait here and calls `wake` when pages were freed, a report came or a replica came up. Knows
no engine and no money.
"""

import asyncio
import math
from collections.abc import Callable
from typing import assert_never

from gateway.door import Door, Let, No, Refusal, Waiting
from gateway.errors import CapacityExceeded, Evicted, GatewayError, QueueFull
from gateway.site import Placed
from gateway.want import Want

# The room wakes itself no more often than this, however soon the door would have it.
_ALARM_LEAST_S = 0.002


class WaitingRoom:
    """The waiting requests of one model. give_back: told of a place whose request has left in that very moment."""

    def __init__(self, door: Door, *, clock: Callable[[], float], give_back: Callable[[Placed], None]) -> None:
        self.door = door
        self._clock = clock
        self._give_back = give_back
        self._admitted: dict[str, asyncio.Future[Let]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        # Told when somebody has to wait: perhaps more can be had for it.
        self.waited: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self.door.queue)

    async def place(self, want: Want, *, wait_s: float, reject_if_busy: bool) -> Let:
        """It is in: where, and how it came to that.

        Raises CapacityExceeded (reject_if_busy, or it would not start in time), QueueFull or Evicted; nothing is held
        then. A cancelled caller leaves the queue at once.
        """
        now = self._clock()
        answer = self.door.arrive(want, now, wait_s=0.0 if reject_if_busy else wait_s)
        match answer:
            case Let():
                return answer
            case Refusal():
                raise self._error(answer, 0.0)
            case Waiting():
                self._set_alarm(self.door.ask_again_s)
                if self.waited is not None:
                    self.waited()
                return await self._wait(answer, now)
            case _:
                assert_never(answer)

    async def _wait(self, waiting: Waiting, now: float) -> Let:
        admitted: asyncio.Future[Let] = asyncio.get_running_loop().create_future()
        self._admitted[waiting.id] = admitted
        try:
            async with asyncio.timeout(max(0.0, waiting.start_by - now)):
                return await admitted
        except TimeoutError:
            self._take_back(admitted)
            ended = self._clock()
            raise self._error(self.door.expired(waiting, ended), ended - now) from None
        except asyncio.CancelledError:
            self._take_back(admitted)
            raise
        finally:
            del self._admitted[waiting.id]
            if not waiting.left:
                self.door.leave(waiting)
                self.wake()

    def _take_back(self, admitted: "asyncio.Future[Let]") -> None:
        """The waiter leaves although it may just have been admitted: its pages go back."""
        if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
            self._give_back(admitted.result().placed)

    def refuse_all(self, error: Exception) -> None:
        """Everybody leaves with `error`: the process is shutting down."""
        for admitted in self._admitted.values():
            if not admitted.done():
                admitted.set_exception(error)

    def refuse(self, told: Callable[[Want], Exception | None]) -> None:
        """Whoever is told something leaves with it; the others wait on."""
        for entry in list(self.door.queue):
            admitted, error = self._admitted.get(entry.id), told(entry.item.want)
            if admitted is not None and error is not None and not admitted.done():
                admitted.set_exception(error)

    def wake(self) -> None:
        """Let in whose turn it is for as long as it fits."""
        if not len(self.door.queue):
            return
        now = self._clock()
        while (answer := self.door.next(now)) is not None:
            admitted = self._admitted.get(answer.waiting.id)
            gone = admitted is None or admitted.done()  # it is leaving
            if isinstance(answer, Let):
                if gone:
                    self._give_back(answer.placed)
                elif admitted is not None:
                    admitted.set_result(answer)
            elif admitted is not None and not gone:
                admitted.set_exception(self._error(answer.refusal, now - answer.waiting.arrived_at))
        self._set_alarm(self.door.ask_again_s)

    def _set_alarm(self, in_s: float) -> None:
        """Ask again by itself: a running stream saves time with every token, and tells nobody."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if in_s < math.inf and len(self.door.queue):
            self._alarm = asyncio.get_running_loop().call_later(max(_ALARM_LEAST_S, in_s), self.wake)

    def close(self) -> None:
        """No alarm rings any more."""
        self._set_alarm(math.inf)

    def _error(self, refusal: Refusal, waited_s: float) -> GatewayError:
        hint_s = refusal.retry_after_s
        match refusal.why:
            case No.BUSY:
                return CapacityExceeded("No capacity is free now.", retry_after_s=hint_s)
            case No.LATE:
                return CapacityExceeded(
                    "The requests before this one take longer than it may wait.", retry_after_s=hint_s
                )
            case No.FULL:
                return QueueFull(f"{len(self)} requests are waiting for this model already.", retry_after_s=hint_s)
            case No.EXPIRED:
                return Evicted(
                    f"The request waited {waited_s:.0f} s for capacity and left the queue at its deadline.",
                    retry_after_s=hint_s,
                )
            case _:
                assert_never(refusal.why)
