"""The keeper's book: each unit's record as this process knows it, and how it changes: written to SQL, then true.

Used by keeper.py and tending.py. Knows no drivers.
"""

import asyncio
import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import structlog

from gateway.lifecycle.driver import Driver
from gateway.lifecycle.states import Event, Record, StartLimits, Unit, Wish, advance
from gateway.lifecycle.store import Call, UnitStore
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A unit that the deployment names. driven_by: a unit whose driver is another one than before is started anew."""

    driver: Driver
    wish: Wish
    driven_by: Hashable = None

    @property
    def driver_name(self) -> str:
        """The same in all processes whose files say the same of it."""
        return hashlib.sha256(repr(self.driven_by).encode()).hexdigest()[:16]


class Kept:
    """One unit. record: as it stands if it is ours; elsewhere: if it is another process's, as last heard.
    unsaved: it has moved on since it was written. loose: something of it may run that nobody has stopped, of a last
    owner's, of a start that failed, or the other half of a pair.
    """

    def __init__(self, unit: Unit, wanted: Wanted) -> None:
        self.unit = unit
        self.wanted = wanted
        self.record: Record | None = None
        self.elsewhere: Record | None = None
        self.unsaved = False
        self.loose = True
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def driver(self) -> Driver:
        return self.wanted.driver

    @property
    def known(self) -> Record | None:
        """As last heard of, whoever's it is."""
        return self.record or self.elsewhere


class Book:
    """owner: names this life of this process. heard: told of every record as it becomes known here, and again whenever
    it has changed. clock: Unix nanoseconds.
    """

    def __init__(
        self,
        store: UnitStore,
        call: Call,
        limits: StartLimits,
        *,
        owner: str,
        clock: Callable[[], int],
        heard: Callable[[Record], None],
    ) -> None:
        self.store = store
        self.call = call
        self.owner = owner
        self.clock = clock
        self._limits = limits
        self._heard = heard

    def age_s(self, record: Record) -> float:
        """Seconds in its state."""
        return (self.clock() - record.since_ns) / 1e9

    def learn(self, kept: Kept, row: Record) -> None:
        """So it was read; nothing is learned of what is older than what is known."""
        known = kept.record
        if known is not None and row.version <= known.version:
            return
        mine = row.owner == self.owner
        if known is not None and mine and kept.unsaved:
            row = newly_wished(known, row)
        if known is not None and not mine:
            log.warning("a unit is another process's now", unit=kept.unit.name, model=kept.unit.model)
        kept.record, kept.elsewhere = (row, None) if mine else (None, row)
        self._heard(row)
        kept.changed.set()

    def has_owner(self, kept: Kept) -> bool:
        """Is it another's, by what was last read? Then nothing is written to find that out again."""
        elsewhere = kept.elsewhere
        if elsewhere is None or elsewhere.owner in {None, self.owner}:
            return False
        return self.clock() < elsewhere.lease_until_ns

    async def take(self, kept: Kept) -> Record | None:
        """Own it, if nobody else does. Raises TenancyUnavailable."""
        record = await self.call(self.store.take, kept.unit, self.owner)
        if record is not None:
            kept.record = record
            self._heard(record)
        return record

    async def move(self, kept: Kept, event: Event) -> bool:
        """It has moved, and that is written. False: somebody else has changed or taken it meanwhile; look again.

        Raises TenancyUnavailable where another process may own it next; else it is written later.
        """
        was = kept.record
        if was is None:  # its lease ended while its driver was at work
            return False
        now = advance(was, event, self.clock(), self._limits)
        try:
            saved = await self.call(self.store.save, was, now)
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

    async def write(self, kept: Kept) -> None:
        """What has moved on while the database was away. Raises TenancyUnavailable if it must be read and can't be."""
        assert kept.record is not None, "it is ours"
        try:
            saved = await self.call(self.store.save, kept.record, kept.record)
        except TenancyUnavailable:
            return
        if saved is None:
            await self._read_again(kept)
        else:
            kept.record, kept.unsaved = saved, False

    async def _read_again(self, kept: Kept) -> None:
        rows, known = await self.call(self.store.of, [kept.unit]), kept.record
        if known is not None and (not rows or rows[0].fence < known.fence):
            # Somebody has forgotten it, and perhaps it was named again: it is nobody's, whatever we knew.
            kept.record, kept.unsaved = None, False
            return
        for row in rows:
            self.learn(kept, row)


def newly_wished(known: Record, row: Record) -> Record:
    """A record that has moved on here since it was written, with the wish that was read."""
    return replace(
        known,
        version=row.version,
        wish=row.wish,
        wish_by=row.wish_by,
        wish_since_ns=row.wish_since_ns,
        wish_depth=row.wish_depth,
    )
