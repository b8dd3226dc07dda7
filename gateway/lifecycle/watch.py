"""How units stand, as far as one process knows: read again and again, and told at once by its keeper and its wishes.

Run by the composition root of every process; where several serve one port, one of them reads SQL and the others ask
it. Knows neither where rows come from nor what is done with news.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from gateway.lifecycle.states import By, Depth, Record, State, Unit, Wish
from tenancy.errors import TenancyUnavailable

# Of several gateways that name the same engine in their region, the one that has it is the one where it stands so.
_MOST_ALIVE: Final = (State.READY, State.DRAINING, State.WARMING, State.ASLEEP, State.FAILED)


class Watch:
    """read: how they stand, whoever says so. heard: told of each record that is news. lost: told of each unit that is
    no more, or whose owner is silent.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Iterable[Record]]],
        *,
        heard: Callable[[Record], None],
        lost: Callable[[Unit], None],
    ) -> None:
        self._read = read
        self._heard = heard
        self._lost = lost
        self._known: dict[Unit, Record] = {}
        self._changes = 0
        self._changed = asyncio.Event()
        self._has_read = False

    async def run(self, pause_s: float) -> None:
        """Until cancelled. While nobody can be asked what was last heard of stands."""
        while True:
            with suppress(TenancyUnavailable):
                self.learn(await self._read())
            await asyncio.sleep(pause_s)

    def learn(self, rows: Iterable[Record]) -> None:
        """So they all stand, unless something later was heard."""
        found = {row.unit: row for row in rows}
        for unit in self._known.keys() - found.keys():
            del self._known[unit]
            self._changes += 1
            self._lost(unit)
            self._tell()
        for unit, row in found.items():
            known = self._known.get(unit)
            # A keeper of this process tells its units' news before they can be read here; one that was forgotten and
            # named again begins with a lower fence.
            if known is None or row.version > known.version or row.fence < known.fence or _is_alive_longer(row, known):
                self.hear(row)
        self._has_read = True

    def hear(self, record: Record) -> None:
        """So it stands now."""
        self._known[record.unit] = record
        self._changes += 1
        self._heard(record)
        self._tell()

    async def news(self, seen: int, *, within_s: float) -> tuple[int, list[Record]] | None:
        """All that is known as soon as anything has changed since `seen`, an earlier answer's number, or at the end of
        the time. None: nothing has been read yet.
        """
        if not self._has_read:
            return None
        if seen == self._changes:
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._changed.wait()
        return self._changes, list(self._known.values())

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _is_alive_longer(row: Record, known: Record) -> bool:
    """The same, and its owner has given a sign of life since."""
    return row.version == known.version and row.lease_until_ns > known.lease_until_ns


def foremost(rows: Iterable[Record], places: Collection[str]) -> list[Record]:
    """Those of these places, and of others one of each name: an engine is one gateway's, whichever name it."""
    rows = list(rows)
    best: dict[tuple[str, str], Record] = {}
    for row in sorted(rows, key=lambda row: (_MOST_ALIVE.index(row.state), row.unit)):
        if row.unit.place not in places:
            best.setdefault((row.unit.model, row.unit.name), row)
    return [row for row in rows if row.unit.place in places] + list(best.values())


def as_fields(record: Record) -> dict[str, Any]:
    """For another process of this gateway; `from_fields` reads it."""
    return asdict(record)


def from_fields(fields: Mapping[str, Any]) -> Record:
    """As it was before `as_fields`."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "unit": lambda unit: Unit(**unit),
        "state": State,
        "wish": Wish,
        "wish_by": By,
        "wish_depth": Depth,
        "depth": Depth,
    }
    return Record(**{name: kinds[name](value) if name in kinds else value for name, value in fields.items()})
