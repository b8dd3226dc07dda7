"""What is done with a unit that is ours, through its driver: it is adopted, started, looked at, drained, put to sleep.

One step at a time, called by keeper.py; what each step changes is written by book.py before the next.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import structlog

from backends.errors import BackendError
from gateway.lifecycle.book import Book, Kept
from gateway.lifecycle.settings import LifecycleSettings
from gateway.lifecycle.start_times import Start, StartTimes
from gateway.lifecycle.states import (
    Answered,
    Depth,
    Failed,
    Found,
    Record,
    Reopened,
    Slept,
    State,
    Unit,
    Vanished,
    Wish,
    found,
)
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)

_WARMING_CHECK_S: Final = 0.1
_DRAINING_CHECK_S: Final = 0.1
CHECK_S: Final = 0.5


class Started(Protocol):
    """Told of starts: how many seconds a good one took."""

    def began(self, unit: Unit) -> None: ...
    def succeeded(self, unit: Unit, seconds: float) -> None: ...
    def failed(self, unit: Unit) -> None: ...


class Tending:
    """drain_s: how long what runs in a unit that is to sleep may take. chance: random numbers of [0, 1).

    Every method may raise TenancyUnavailable; the step is then taken again.
    """

    def __init__(
        self,
        book: Book,
        settings: LifecycleSettings,
        *,
        drain_s: float,
        chance: Callable[[], float],
        started: Started,
        times: StartTimes,
    ) -> None:
        self._book = book
        self._settings = settings
        self._drain_s = drain_s
        self._chance = chance
        self._started = started
        self._times = times

    async def adopt(self, kept: Kept) -> bool:
        """Own it, and find out what of the last owner's is left. False: it is another's."""
        record = await self._book.take(kept)
        if record is None:
            return False
        try:
            match found(record, runs=await kept.driver.running()):
                case Found.GONE:
                    await self._book.move(kept, Vanished())
                case Found.LEFT_OVER:
                    await _stop(kept)
                case Found.AS_WRITTEN:
                    pass
        except BackendError as error:
            log.warning("a unit can't be looked at", unit=kept.unit.name, why=error.message)
        return kept.record is not None

    async def begin(self, kept: Kept, *, resume: bool) -> None:
        """Start it, or let it take its memory back: what is written already."""
        self._started.began(kept.unit)
        kept.loose = True
        try:
            await (kept.driver.resume() if resume else kept.driver.start())
        except BackendError as error:
            why = error.message
            if resume:
                try:
                    await _stop(kept)
                except BackendError as also:
                    why = f"{why}; {also.message}"
            await self._fail(kept, why)

    async def reopen(self, kept: Kept) -> None:
        """It was to sleep, and is wanted again."""
        try:
            runs = await kept.driver.running()
        except BackendError:
            runs = False
        await self._book.move(kept, Reopened() if runs else Slept(Depth.STOPPED))

    async def look_after(self, kept: Kept, record: Record) -> float:
        """It is as it is wished, or on the way there; seconds until the next look."""
        try:
            runs = await kept.driver.running()
            match record.state:
                case State.WARMING:
                    await self._warm(kept, record, runs=runs)
                    return _WARMING_CHECK_S
                case State.READY if not runs:
                    await self._fail(kept, kept.driver.last_words() or "it has died")
                    return 0.0
                case State.DRAINING:
                    await self._drain(kept, record, runs=runs)
                    return _DRAINING_CHECK_S
                case State.ASLEEP if record.depth is Depth.RELEASED:
                    if not runs:
                        await self._book.move(kept, Vanished())
                case State.ASLEEP | State.FAILED if kept.loose:
                    await self._end_what_is_left(kept, record)
        except BackendError as error:
            log.warning("a unit can't be looked at", unit=kept.unit.name, why=error.message)
        return CHECK_S

    async def ended(self, kept: Kept) -> None:
        """Until what runs there has ended, or has had its time. Raises BackendError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while await kept.driver.busy():  # noqa: ASYNC110 - an engine has no event; this is no hot path
                    await asyncio.sleep(_DRAINING_CHECK_S)

    async def _warm(self, kept: Kept, record: Record, *, runs: bool) -> None:
        if not runs:
            await self._fail(kept, kept.driver.last_words() or "it ended while it started")
        elif await kept.driver.ready():
            if await self._book.move(kept, Answered()):
                seconds = self._book.age_s(record)
                self._started.succeeded(kept.unit, seconds)
                with suppress(TenancyUnavailable):  # the next one will be as good to learn from
                    parts = await kept.driver.start_parts()
                    await self._book.call(self._times.note, Start(kept.unit, record.depth, seconds, parts))
                log.info("a unit is ready", unit=kept.unit.name, model=kept.unit.model, seconds=round(seconds, 1))
        elif self._book.age_s(record) > self._settings.start_seconds_max:
            await _stop(kept)
            said = kept.driver.last_words()
            await self._fail(kept, f"it was not ready after {self._settings.start_seconds_max:g} s. {said}".rstrip())

    async def _drain(self, kept: Kept, record: Record, *, runs: bool) -> None:
        """One of which a part has died gives no memory up: what is left of it ends its work and is stopped."""
        closed = not runs or self._book.age_s(record) >= self._settings.close_seconds
        if closed and await self._has_ended(kept, record):
            depth = record.wish_depth if runs else Depth.STOPPED
            await self._note_sleep(kept, Slept(await self._put_to_sleep(kept, depth)))

    async def _has_ended(self, kept: Kept, record: Record) -> bool:
        """What ran there has, or has had its time."""
        return self._book.age_s(record) >= self._drain_s or not await kept.driver.busy()

    async def _end_what_is_left(self, kept: Kept, record: Record) -> None:
        """Nothing of it is to run, whatever its last owner or a start that failed has left: the half of a pair whose
        other half died, an engine that outlives its launcher. A next start that is due soon takes it as it is.
        """
        starts_soon = record.state is State.ASLEEP and record.wish is Wish.AWAKE
        if not starts_soon and await self._has_ended(kept, record):
            await _stop(kept)

    async def _note_sleep(self, kept: Kept, slept: Slept) -> None:
        """It is done, whatever has been wished meanwhile, and is written as soon as it can be: whoever is woken before
        that would be taken to have its memory.
        """
        while kept.record is not None and kept.record.state is State.DRAINING:
            try:
                await self._book.move(kept, slept)
            except TenancyUnavailable:
                await asyncio.sleep(CHECK_S)

    async def _put_to_sleep(self, kept: Kept, depth: Depth) -> Depth:
        """As deep as is wished; one that can't give its memory back is stopped."""
        if depth is Depth.RELEASED:
            try:
                await kept.driver.release()
            except BackendError as error:
                log.warning("an engine keeps its memory and is stopped", unit=kept.unit.name, why=error.message)
            else:
                return Depth.RELEASED
        await _stop(kept)
        return Depth.STOPPED

    async def _fail(self, kept: Kept, why: str) -> None:
        if await self._book.move(kept, Failed(why, self._chance())):
            self._started.failed(kept.unit)
            record = kept.record
            assert record is not None, "it has just moved"
            log.error(
                "a unit failed",
                unit=kept.unit.name,
                model=kept.unit.model,
                failures=record.failures,
                again_in_s=round((record.retry_at_ns - self._book.clock()) / 1e9, 1),
                rests=record.state is State.FAILED,
                why=why,
            )


async def _stop(kept: Kept) -> None:
    await kept.driver.stop()
    kept.loose = False
