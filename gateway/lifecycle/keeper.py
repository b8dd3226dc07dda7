"""Carries out what is wished of units: owns those that this process can drive, starts, drains and stops them.

One a process, as a task of its composition root. What happens to a unit is decided by states.py and kept by store.py
before it is done (book.py), so that nothing is started twice: whoever could not write it does not do it. Units of this
process's own place are the exception while the database is away: nobody else can drive them, so they are looked after
all the same, and it is written later. What is done with one unit is tending.py's, which has to sleep for it rooms.py's.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import structlog

from backends.errors import BackendError
from gateway.lifecycle.book import Book, Kept, Wanted
from gateway.lifecycle.deployers import Deployers
from gateway.lifecycle.rooms import Rooms
from gateway.lifecycle.settings import LifecycleSettings
from gateway.lifecycle.start_times import StartTimes
from gateway.lifecycle.states import Begun, Closed, Deed, Record, Unit, Vanished, due
from gateway.lifecycle.store import Call, UnitStore
from gateway.lifecycle.tending import CHECK_S, Started, Tending
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)


_LEAVE_S_MAX: Final = 20.0
_LEAVE_TRIES: Final = 3


class Keeper:
    """owner: names this life of this process. clock: Unix nanoseconds. chance: random numbers of [0, 1).

    deployers: who else has units that gateways share. rooms: where units share memory, who sleeps for whom. heard: told
    of every unit's record as it becomes known here, and again whenever it has changed. drain_s: how long what runs in a
    unit that is to sleep may take.
    """

    def __init__(
        self,
        store: UnitStore,
        call: Call,
        settings: LifecycleSettings,
        rooms: Rooms,
        deployers: Deployers,
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
        self._owner = owner
        self._deployers = deployers
        self.rooms = rooms
        # One at a time, so that no two find the same memory free.
        self._placing = asyncio.Lock()
        self._clock = clock
        self._book = Book(store, call, settings.start_limits(), owner=owner, clock=clock, heard=heard)
        self._tending = Tending(self._book, settings, drain_s=drain_s, chance=chance, started=started, times=times)
        self._wanted: dict[Unit, Wanted] = {}
        self._kept: dict[Unit, Kept] = {}
        self._poke = asyncio.Event()
        self._added = False
        self._renew_at_ns = 0

    def want(self, wanted: Mapping[Unit, Wanted]) -> None:
        """These units and no others from now on. Others are drained and stopped; nobody sends anything new there."""
        self._wanted = dict(wanted)
        self._added = False
        self._renew_at_ns = 0
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
                    await self._leave_shared()

    # What there is to keep

    def _take_up(self, group: asyncio.TaskGroup) -> None:
        for unit, kept in list(self._kept.items()):
            wanted = self._wanted.get(unit)
            if wanted is None or wanted.driven_by != kept.wanted.driven_by:
                del self._kept[unit]
                group.create_task(self._retire(kept, forget=wanted is None), name=f"retire {unit.name}")
        for unit in self._wanted.keys() - self._kept.keys():
            kept = self._kept[unit] = Kept(unit, self._wanted[unit])
            kept.task = group.create_task(self._keep(kept), name=f"keep {unit.name}")

    async def _retire(self, kept: Kept, *, forget: bool) -> None:
        """Its processes end when what runs there has ended. forget: the unit is no more; else it has another driver."""
        await _ended(kept.task)
        try:
            if not await self._is_left_to_us(kept):
                return
            await self._tending.ended(kept)
            if not await self._is_left_to_us(kept):
                return
            await kept.driver.stop()
            if forget and kept.unit not in self._kept:
                await self._call(self._store.forget, kept.unit)
        except (BackendError, TenancyUnavailable) as error:
            log.error("a unit that is no longer deployed could not be ended", unit=kept.unit.name, why=error.message)  # noqa: TRY400 - the message says it all
        except asyncio.CancelledError:
            await kept.driver.leave()
            raise

    async def _is_left_to_us(self, kept: Kept) -> bool:
        """Of a unit that several gateways share: once nobody else has it. One that had it and was killed stops nothing,
        so that whoever dropped it before goes on asking until it is forgotten, or wanted here again.
        """
        if kept.unit.place:
            return True
        while True:
            again = self._kept.get(kept.unit)
            if again is not None and again.wanted.driven_by == kept.wanted.driven_by:
                return False
            with suppress(TenancyUnavailable):  # it is asked again
                if await self._call(self._deployers.drop, self._owner, kept.unit, kept.wanted.driver_name):
                    return True
                if not await self._call(self._store.of, [kept.unit]):
                    return False
                if kept.record is not None:
                    await self._call(self._store.free, kept.record)
                    kept.record = None
            await asyncio.sleep(self._settings.lease_seconds / 3)

    async def _refresh(self) -> None:
        """What others have wished, and a sign of life. Without a database everything stays as it is."""
        wanted = self._wanted  # there may be others before this has ended
        try:
            if self._clock() >= self._renew_at_ns:
                await self._renew(wanted)
            if not self._added:
                await self._call(self._store.add, [(unit, one.wish) for unit, one in wanted.items()])
                self._added = wanted is self._wanted
            records = await self._call(self._store.of, list(wanted))
        except TenancyUnavailable:
            return
        for record in records:
            kept = self._kept.get(record.unit)
            if kept is not None:
                self._book.learn(kept, record)
        if len(records) < len(wanted):
            self._added = False  # somebody has forgotten one

    async def _renew(self, wanted: Mapping[Unit, Wanted]) -> None:
        if shared := [(unit, one.driver_name) for unit, one in wanted.items() if not unit.place]:
            await self._call(self._deployers.declare, self._owner, shared)
        await self._call(self._store.renew, self._owner)
        if wanted is self._wanted:
            self._renew_at_ns = self._clock() + round(self._settings.lease_seconds / 3 * 1e9)

    # One unit

    async def _keep(self, kept: Kept) -> None:
        while True:
            kept.changed.clear()
            try:
                pause_s = await self._step(kept)
            except TenancyUnavailable:
                pause_s = CHECK_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await kept.changed.wait()

    async def _step(self, kept: Kept) -> float:
        """One thing that is due; seconds until there may be another. Raises TenancyUnavailable."""
        if kept.record is None and (self._book.has_owner(kept) or not await self._tending.adopt(kept)):
            return CHECK_S
        if kept.unsaved:
            await self._book.write(kept)
        record = kept.record
        if record is None:
            return 0.0
        deed = due(record, self._clock())
        match deed:
            case Deed.START | Deed.RESUME:
                async with self._placing:
                    wait_s = await self._make_room(kept)
                    begun = wait_s is None and await self._book.move(kept, Begun())
                if begun:
                    await self._tending.begin(kept, resume=deed is Deed.RESUME)
                return wait_s or 0.0
            case Deed.CLOSE:
                await self._book.move(kept, Closed())
            case Deed.REOPEN:
                await self._tending.reopen(kept)
            case Deed.NOTHING:
                return await self._tending.look_after(kept, record)
        return 0.0

    async def _make_room(self, kept: Kept) -> float | None:
        """Seconds to wait for others to sleep; None: it has its place."""
        known = [record for other in self._kept.values() if (record := other.known) is not None]
        return await self.rooms.make(kept.unit, known, self._busy, self._wished_asleep)

    async def _busy(self, unit: Unit) -> bool:
        kept = self._kept.get(unit)
        try:
            return kept is not None and await kept.driver.busy()
        except BackendError:
            return True  # nobody knows

    def _wished_asleep(self, record: Record) -> None:
        if (kept := self._kept.get(record.unit)) is not None:
            self._book.learn(kept, record)

    async def _leave(self, kept: Kept) -> None:
        try:
            await kept.driver.leave()
            for _ in range(_LEAVE_TRIES):  # what was being written when this began may still come in between
                if kept.record is None or await kept.driver.running() or await self._book.move(kept, Vanished()):
                    break
            if kept.record is not None:
                await self._call(self._store.free, kept.record)
        except (BackendError, TenancyUnavailable) as error:
            # Whoever comes next finds out what is left, after the lease.
            log.warning("a unit could not be given up", unit=kept.unit.name, why=error.message)

    async def _leave_shared(self) -> None:
        if all(unit.place for unit in self._wanted):
            return
        with suppress(TenancyUnavailable):  # the lease ends
            await self._call(self._deployers.leave, self._owner)


async def _ended(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
