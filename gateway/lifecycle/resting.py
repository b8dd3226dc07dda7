"""Puts units to sleep that nobody uses, and wakes those that the deployment file wants awake at this time of the week.

A task of every process. Each notes in SQL when it has seen a unit used, so that none sleeps because this process alone
had nothing for it, and what was idle before a restart is idle after it. Wishes meet in the store: whoever wishes second
changes nothing.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from backends.serverless import Serverless
from gateway.lifecycle.idle import Use, wishes_of_sides
from gateway.lifecycle.sides import Side, by_side
from gateway.lifecycle.states import Record, Unit, Wished
from gateway.lifecycle.store import Call, UnitStore
from gateway.lifecycle.uses import UseStore
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)

_SECOND_NS: Final = 1_000_000_000
# A use is written again after such a part of the idle time, or so many seconds: others may take a unit to have been
# idle for so much longer than it was.
_TOLD_SHARE: Final = 0.1
_TOLD_S_MAX: Final = 10.0


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A model that may sleep, as this process sees it. records: its units as last heard of.

    busy: units, by name, at which something runs or waits. ended: how many requests of this process have ended there.
    waiting: does any request wait for the model? sides: of a group, by unit.
    """

    model: str
    serverless: Serverless
    records: Sequence[Record]
    busy: frozenset[str] = frozenset()
    ended: Mapping[str, int] = field(default_factory=dict)
    waiting: bool = False
    sides: Mapping[str, Side] = field(default_factory=dict)


class Resting:
    """models: read at each turn. wished: told of each record that a wish has
    changed. clock: Unix nanoseconds.
    """

    def __init__(
        self,
        store: UnitStore,
        uses: UseStore,
        call: Call,
        *,
        interval_s: float,
        models: Callable[[], Iterable[Sleeper]],
        wished: Callable[[Record], None],
        clock: Callable[[], int],
    ) -> None:
        self._store = store
        self._uses = uses
        self._call = call
        self._interval_s = interval_s
        self._models = models
        self._wished = wished
        self._clock = clock
        self._used: dict[Unit, int] = {}
        self._told: dict[Unit, int] = {}
        self._ended: dict[Unit, int] = {}

    async def run(self) -> None:
        """Until cancelled. While the database is away nobody is put to sleep."""
        while True:
            with suppress(TenancyUnavailable):
                await self.turn()
            await asyncio.sleep(self._interval_s)

    async def turn(self) -> None:
        """Note what is used, and wish what follows from it. Raises TenancyUnavailable."""
        sleepers, now_ns = list(self._models()), self._clock()
        self._note(sleepers, now_ns)
        if not sleepers:
            return
        if untold := self._untold(sleepers):
            await self._call(self._uses.note, untold)
            self._told |= untold
        places = {record.unit.place for sleeper in sleepers for record in sleeper.records}
        told = await self._call(self._uses.of, sorted(places))
        for sleeper in sleepers:
            uses = [self._use(record, sleeper, told) for record in sleeper.records]
            for unit, wished in _wishes(sleeper, uses, now_ns):
                record = await self._call(self._store.wish, unit, wished)
                if record is not None and record.wish is wished.wish:
                    log.info("a wish of the file", unit=unit.name, model=unit.model, wish=wished.wish, by=wished.by)
                    self._wished(record)

    def _note(self, sleepers: Iterable[Sleeper], now_ns: int) -> None:
        known = {record.unit: sleeper for sleeper in sleepers for record in sleeper.records}
        for unit in self._ended.keys() - known.keys():
            for memory in (self._used, self._told, self._ended):
                memory.pop(unit, None)
        for unit, sleeper in known.items():
            ended = sleeper.ended.get(unit.name, 0)
            if unit.name in sleeper.busy or ended != self._ended.get(unit, ended):
                self._used[unit] = now_ns
            self._ended[unit] = ended

    def _untold(self, sleepers: Iterable[Sleeper]) -> dict[Unit, int]:
        untold = {}
        for sleeper in sleepers:
            after_ns = round(min(_TOLD_S_MAX, _TOLD_SHARE * sleeper.serverless.idle_seconds) * _SECOND_NS)
            for unit in (record.unit for record in sleeper.records):
                used_ns = self._used.get(unit, 0)
                if used_ns and used_ns - self._told.get(unit, 0) >= after_ns:
                    untold[unit] = used_ns
        return untold

    def _use(self, record: Record, sleeper: Sleeper, told: Mapping[Unit, int]) -> Use:
        unit = record.unit
        used_ns = max(told.get(unit, 0), self._used.get(unit, 0))
        return Use(record, busy=unit.name in sleeper.busy, used_at_ns=used_ns)


def _wishes(sleeper: Sleeper, uses: Iterable[Use], now_ns: int) -> list[tuple[Unit, Wished]]:
    known = {use.unit: use for use in uses}
    sides = by_side(sleeper.records, sleeper.sides).values()
    apart = [[known[record.unit] for record in records] for records in sides]
    return wishes_of_sides(sleeper.serverless, apart, now_ns, waiting=sleeper.waiting)
