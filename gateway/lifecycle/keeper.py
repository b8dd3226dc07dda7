"""Carries out what is wished of units: owns those that this process can drive, starts, drains and stops them.

One a process, as a task of its composition root. What happens to a unit is decided by states.py and kept by store.py
before it is done, so that nothing is started twice: whoever could not write it does not do it. Units of this process's
own place are the exception while the database is away: nobody else can drive them, so they are looked after all the
same, and it is written later.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog

from backends.errors import BackendError
from gateway.lifecycle.driver import Driver
from gateway.lifecycle.rooms import Rooms
from gateway.lifecycle.settings import LifecycleSettings
from gateway.lifecycle.start_times import Start, StartTimes
from gateway.lifecycle.states import (
    Answered,
    Begun,
    Closed,
    Deed,
    Depth,
    Event,
    Failed,
    Record,
    Reopened,
    Slept,
    State,
    Unit,
    Vanished,
    Wish,
    advance,
    due,
)
from gateway.lifecycle.store import Call, UnitStore
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)


_WARMING_CHECK_S: Final = 0.1
_DRAINING_CHECK_S: Final = 0.1
_CHECK_S: Final = 0.5
_LEAVE_S_MAX: Final = 20.0
_LEAVE_TRIES: Final = 3
_NO_EVENT: Final = frozenset({State.ASLEEP, State.FAILED})


@dataclass(frozen=True, slots=True)
class Wanted:
    """A unit that the deployment names. driven_by: a unit whose driver is another one than before is started anew."""

    driver: Driver
    wish: Wish
    driven_by: Hashable = None


class Started(Protocol):
    """Told of starts: how many seconds a good one took."""

    def began(self, unit: Unit) -> None: ...
    def succeeded(self, unit: Unit, seconds: float) -> None: ...
    def failed(self, unit: Unit) -> None: ...


class _Kept:
    """One unit. record: as it stands if it is ours; elsewhere: if it is another process's, as last heard.
    unsaved: it has moved on since it was written.
    """

    def __init__(self, unit: Unit, wanted: Wanted) -> None:
        self.unit = unit
        self.wanted = wanted
        self.record: Record | None = None
        self.elsewhere: Record | None = None
        self.unsaved = False
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def driver(self) -> Driver:
        return self.wanted.driver


class Keeper:
    """owner: names this life of this process. clock: Unix nanoseconds. chance: random numbers of [0, 1).

    rooms: where units share memory, who sleeps for whom. heard: told of every unit's record as it becomes known here,
    and again whenever it has changed. drain_s: how long what runs in a unit that is to sleep may take.
    """

    def __init__(
        self,
        store: UnitStore,
        call: Call,
        settings: LifecycleSettings,
        rooms: Rooms,
        *,
        owner: str,
        drain_s: float,
        clock: Callable[[], int],
        chance: Callable[[], float],
        heard: Callable[[Record], None],
        started: Started,
        times: StartTimes,
    ) -> None:
        self._store = store
        self._call = call
        self._settings = settings
        self._limits = settings.start_limits()
        self._owner = owner
        self.rooms = rooms
        # One at a time, so that no two find the same memory free.
        self._placing = asyncio.Lock()
        self._drain_s = drain_s
        self._clock = clock
        self._chance = chance
        self._heard = heard
        self._started = started
        self._times = times
        self._wanted: dict[Unit, Wanted] = {}
        self._kept: dict[Unit, _Kept] = {}
        self._poke = asyncio.Event()
        self._added = False
        self._renew_at_ns = 0

    def want(self, wanted: Mapping[Unit, Wanted]) -> None:
        """These units and no others from now on. Others are drained and stopped; nobody sends anything new there."""
        self._wanted = dict(wanted)
        self._added = False
        self._poke.set()

    def poke(self) -> None:
        """Something has been wished: look at once."""
        self._poke.set()

    async def run(self) -> None:
        """Until cancelled; then what would end with this process is stopped, and everything given up."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._poke.clear()
                    self._take_up(group)
                    await self._refresh()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._settings.poll_interval_s):
                            await self._poke.wait()
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S_MAX):
                    await asyncio.gather(*(self._leave(kept) for kept in self._kept.values()))

    # What there is to keep

    def _take_up(self, group: asyncio.TaskGroup) -> None:
        for unit, kept in list(self._kept.items()):
            wanted = self._wanted.get(unit)
            if wanted is None or wanted.driven_by != kept.wanted.driven_by:
                del self._kept[unit]
                group.create_task(self._retire(kept, forget=wanted is None), name=f"retire {unit.name}")
        for unit in self._wanted.keys() - self._kept.keys():
            kept = self._kept[unit] = _Kept(unit, self._wanted[unit])
            kept.task = group.create_task(self._keep(kept), name=f"keep {unit.name}")

    async def _retire(self, kept: _Kept, *, forget: bool) -> None:
        """Its processes end when what runs there has ended. forget: the unit is no more; else it has another driver."""
        await _ended(kept.task)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._drain_s):
                    while await kept.driver.busy():  # noqa: ASYNC110 - an engine has no event; this is no hot path
                        await asyncio.sleep(_DRAINING_CHECK_S)
            await kept.driver.stop()
            if forget and kept.unit not in self._kept:
                await self._call(self._store.forget, kept.unit)
        except (BackendError, TenancyUnavailable) as error:
            log.error("a unit that is no longer deployed could not be ended", unit=kept.unit.name, why=error.message)  # noqa: TRY400 - the message says it all
        except asyncio.CancelledError:
            await kept.driver.leave()
            raise

    async def _refresh(self) -> None:
        """What others have wished, and a sign of life. Without a database everything stays as it is."""
        try:
            if not self._added:
                wishes = [(unit, wanted.wish) for unit, wanted in self._wanted.items()]
                await self._call(self._store.add, wishes)
                self._added = True
            if self._clock() >= self._renew_at_ns:
                await self._call(self._store.renew, self._owner)
                self._renew_at_ns = self._clock() + round(self._settings.lease_seconds / 3 * 1e9)
            records = await self._call(self._store.of, list(self._wanted))
        except TenancyUnavailable:
            return
        for record in records:
            kept = self._kept.get(record.unit)
            if kept is not None:
                self._learn(kept, record)
        if len(records) < len(self._wanted):
            self._added = False  # somebody has forgotten one

    def _learn(self, kept: _Kept, row: Record) -> None:
        known = kept.record
        if known is not None and row.version <= known.version:
            return
        mine = row.owner == self._owner
        if known is not None and mine and kept.unsaved:
            row = replace(
                known,
                version=row.version,
                wish=row.wish,
                wish_by=row.wish_by,
                wish_since_ns=row.wish_since_ns,
                wish_depth=row.wish_depth,
            )
        if known is not None and not mine:
            log.warning("a unit is another process's now", unit=kept.unit.name, model=kept.unit.model)
        kept.record, kept.elsewhere = (row, None) if mine else (None, row)
        self._heard(row)
        kept.changed.set()

    # One unit

    async def _keep(self, kept: _Kept) -> None:
        while True:
            kept.changed.clear()
            try:
                pause_s = await self._step(kept)
            except TenancyUnavailable:
                pause_s = _CHECK_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await kept.changed.wait()

    async def _step(self, kept: _Kept) -> float:
        """One thing that is due; seconds until there may be another. Raises TenancyUnavailable."""
        if kept.record is None and (self._has_owner(kept.elsewhere) or not await self._adopt(kept)):
            return _CHECK_S
        if kept.unsaved:
            await self._write(kept)
        record = kept.record
        if record is None:
            return 0.0
        deed = due(record, self._clock())
        match deed:
            case Deed.START | Deed.RESUME:
                async with self._placing:
                    wait_s = await self._make_room(kept)
                    begun = wait_s is None and await self._move(kept, Begun())
                if begun:
                    await self._begin(kept, resume=deed is Deed.RESUME)
                return wait_s or 0.0
            case Deed.CLOSE:
                await self._move(kept, Closed())
            case Deed.REOPEN:
                runs = await self._runs(kept)
                await self._move(kept, Reopened() if runs else Slept(Depth.STOPPED))
            case Deed.NOTHING:
                return await self._look_after(kept, record)
        return 0.0

    def _has_owner(self, elsewhere: Record | None) -> bool:
        """Is it another's, by what was last read? Then nothing is written to find that out again."""
        if elsewhere is None or elsewhere.owner in {None, self._owner}:
            return False
        return self._clock() < elsewhere.lease_until_ns

    async def _adopt(self, kept: _Kept) -> bool:
        """Own it, and find out what of the last owner's is left."""
        record = await self._call(self._store.take, kept.unit, self._owner)
        if record is None:
            return False
        kept.record = record
        self._heard(record)
        try:
            runs = await kept.driver.running()
            asleep = record.state in _NO_EVENT
            if not runs and (not asleep or record.depth is Depth.RELEASED):
                await self._move(kept, Vanished())
            elif runs and asleep and record.depth is Depth.STOPPED and record.wish is not Wish.AWAKE:
                await kept.driver.stop()
        except BackendError as error:
            log.warning("a unit can't be looked at", unit=kept.unit.name, why=error.message)
        return kept.record is not None

    async def _make_room(self, kept: _Kept) -> float | None:
        """Seconds to wait for others to sleep; None: it has its place."""
        return await self.rooms.make(
            kept.unit,
            [record for other in self._kept.values() if (record := other.record or other.elsewhere) is not None],
            self._busy,
            self._wished_asleep,
        )

    async def _busy(self, unit: Unit) -> bool:
        kept = self._kept.get(unit)
        try:
            return kept is not None and await kept.driver.busy()
        except BackendError:
            return True  # nobody knows

    def _wished_asleep(self, record: Record) -> None:
        if (kept := self._kept.get(record.unit)) is not None:
            self._learn(kept, record)

    async def _begin(self, kept: _Kept, *, resume: bool) -> None:
        self._started.began(kept.unit)
        try:
            await (kept.driver.resume() if resume else kept.driver.start())
        except BackendError as error:
            why = error.message
            if resume:
                try:
                    await kept.driver.stop()
                except BackendError as also:
                    why = f"{why}; {also.message}"
            await self._fail(kept, why)

    async def _look_after(self, kept: _Kept, record: Record) -> float:
        """It is as it is wished, or on the way there."""
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
                case State.ASLEEP if record.depth is Depth.RELEASED and not runs:
                    await self._move(kept, Vanished())
        except BackendError as error:
            log.warning("a unit can't be looked at", unit=kept.unit.name, why=error.message)
        return _CHECK_S

    async def _warm(self, kept: _Kept, record: Record, *, runs: bool) -> None:
        if not runs:
            await self._fail(kept, kept.driver.last_words() or "it ended while it started")
        elif await kept.driver.ready():
            if await self._move(kept, Answered()):
                seconds = self._age_s(record)
                self._started.succeeded(kept.unit, seconds)
                with suppress(TenancyUnavailable):  # the next one will be as good to learn from
                    parts = await kept.driver.start_parts()
                    await self._call(self._times.note, Start(kept.unit, record.depth, seconds, parts))
                log.info("a unit is ready", unit=kept.unit.name, model=kept.unit.model, seconds=round(seconds, 1))
        elif self._age_s(record) > self._settings.start_seconds_max:
            await kept.driver.stop()
            said = kept.driver.last_words()
            await self._fail(kept, f"it was not ready after {self._settings.start_seconds_max:g} s. {said}".rstrip())

    async def _drain(self, kept: _Kept, record: Record, *, runs: bool) -> None:
        age_s = self._age_s(record)
        if not runs:
            await self._move(kept, Slept(Depth.STOPPED))
        elif age_s >= self._settings.close_seconds and (age_s >= self._drain_s or not await kept.driver.busy()):
            await self._note_sleep(kept, Slept(await self._put_to_sleep(kept, record.wish_depth)))

    async def _note_sleep(self, kept: _Kept, slept: Slept) -> None:
        """It is done, whatever has been wished meanwhile, and is written as soon as it can be: whoever is woken before
        that would be taken to have its memory.
        """
        while kept.record is not None and kept.record.state is State.DRAINING:
            try:
                await self._move(kept, slept)
            except TenancyUnavailable:
                await asyncio.sleep(_CHECK_S)

    @staticmethod
    async def _runs(kept: _Kept) -> bool:
        try:
            return await kept.driver.running()
        except BackendError:
            return False

    async def _put_to_sleep(self, kept: _Kept, depth: Depth) -> Depth:
        """As deep as is wished; one that can't give its memory back is stopped."""
        if depth is Depth.RELEASED:
            try:
                await kept.driver.release()
            except BackendError as error:
                log.warning("an engine keeps its memory and is stopped", unit=kept.unit.name, why=error.message)
            else:
                return Depth.RELEASED
        await kept.driver.stop()
        return Depth.STOPPED

    async def _fail(self, kept: _Kept, why: str) -> None:
        if await self._move(kept, Failed(why, self._chance())):
            self._started.failed(kept.unit)
            record = kept.record
            assert record is not None, "it has just moved"
            log.error(
                "a unit failed",
                unit=kept.unit.name,
                model=kept.unit.model,
                failures=record.failures,
                again_in_s=round((record.retry_at_ns - self._clock()) / 1e9, 1),
                rests=record.state is State.FAILED,
                why=why,
            )

    async def _move(self, kept: _Kept, event: Event) -> bool:
        """It has moved, and that is written. False: somebody else has changed or taken it meanwhile; look again."""
        was = kept.record
        if was is None:  # its lease ended while its driver was at work
            return False
        now = advance(was, event, self._clock(), self._limits)
        try:
            saved = await self._call(self._store.save, was, now)
        except TenancyUnavailable:
            if not kept.unit.place:
                raise
            saved, kept.unsaved = now, True
        else:
            kept.unsaved = kept.unsaved and saved is None
        if saved is None:
            await self._read_again(kept)
            return False
        kept.record = saved
        self._heard(saved)
        return True

    async def _write(self, kept: _Kept) -> None:
        """What has moved on while the database was away."""
        assert kept.record is not None, "it is ours"
        try:
            saved = await self._call(self._store.save, kept.record, kept.record)
        except TenancyUnavailable:
            return
        if saved is None:
            await self._read_again(kept)
        else:
            kept.record, kept.unsaved = saved, False

    async def _read_again(self, kept: _Kept) -> None:
        rows, known = await self._call(self._store.of, [kept.unit]), kept.record
        if known is not None and (not rows or rows[0].fence < known.fence):
            # Somebody has forgotten it, and perhaps it was named again: it is nobody's, whatever we knew.
            kept.record, kept.unsaved = None, False
            return
        for row in rows:
            self._learn(kept, row)

    async def _leave(self, kept: _Kept) -> None:
        try:
            await kept.driver.leave()
            for _ in range(_LEAVE_TRIES):  # what was being written when this began may still come in between
                if kept.record is None or await kept.driver.running() or await self._move(kept, Vanished()):
                    break
            if kept.record is not None:
                await self._call(self._store.free, kept.record)
        except (BackendError, TenancyUnavailable) as error:
            # Whoever comes next finds out what is left, after the lease.
            log.warning("a unit could not be given up", unit=kept.unit.name, why=error.message)

    def _age_s(self, record: Record) -> float:
        return (self._clock() - record.since_ns) / 1e9


async def _ended(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
