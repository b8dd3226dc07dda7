"""How long a unit takes to start, learned from its starts, part by part. Kept in SQL: a restart forgets nothing.

The process that starts a unit notes each start; every process reads what has been noted, and tells from it when a model
that is woken will serve (waking.py) and how far ahead demand must be foreseen (scaler.py). A start with a process and
one that only takes memory back are two different things.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from gateway.lifecycle.states import Depth, Unit
from gateway.lifecycle.tables import unit_starts
from tenancy.database import Database

KEPT: Final = 32
"""The latest starts of a unit: enough for a 90th percentile, and few enough that a new checkpoint is soon learned."""
_P90: Final = 0.9
# Of this many samples the largest is passed by the next one time in ten: from here on a p90 is no guess.
_ENOUGH: Final = 9


@dataclass(frozen=True, slots=True)
class Start:
    """One that succeeded. depth: of the sleep that it ended. seconds: until it could be used. parts: of it, in seconds,
    as far as the engine says them.
    """

    unit: Unit
    depth: Depth
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of the next start, in seconds. samples: starts that it is made from."""

    samples: int
    p50: float
    p90: float


def estimate(seconds: Sequence[float]) -> Estimate | None:
    """From these starts; None without any.

    p90: the next start takes longer one time in ten. Of n starts in no particular order the next one passes the k-th
    smallest with probability 1 - k / (n + 1), whatever their distribution, so k is 0.9 (n + 1) rounded up. With fewer
    than nine there is no such k, and the largest is stretched by 1 / (n + 1): a guess, which shrinks as they grow.
    """
    if not seconds:
        return None
    ordered, number = sorted(seconds), len(seconds)
    middle = (ordered[(number - 1) // 2] + ordered[number // 2]) / 2
    if number < _ENOUGH:
        return Estimate(number, middle, ordered[-1] * (1 + 1 / (number + 1)))
    return Estimate(number, middle, ordered[math.ceil(_P90 * (number + 1)) - 1])


class StartTimes:
    """What one process knows. Estimates are looked up without a wait; `note` and `load` are synchronous, and SQL."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[tuple[Unit, Depth], list[dict[str, Any]]] = {}

    def note(self, start: Start) -> None:
        """By the unit's owner alone: what it reads here nobody else changes meanwhile."""
        key = _is(start.unit, start.depth)
        with self._database.write() as connection:
            row = connection.execute(sa.select(unit_starts.c.samples).where(key)).scalar()
            samples = [*(row or []), {"seconds": start.seconds, "parts": dict(start.parts)}][-KEPT:]
            if row is None:
                values = {"model": start.unit.model, "name": start.unit.name, "place": start.unit.place}
                connection.execute(unit_starts.insert().values(depth=start.depth, samples=samples, **values))
            else:
                connection.execute(unit_starts.update().where(key).values(samples=samples))
        # Another one in its place: whoever reads it in another thread goes through a whole one.
        self._known = {**self._known, (start.unit, start.depth): samples}

    def load(self, places: Iterable[str]) -> None:
        """What is known of the units of these places."""
        query = sa.select(unit_starts).where(unit_starts.c.place.in_(list(places)))
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        self._known = {
            (Unit(row["model"], row["name"], row["place"]), Depth(row["depth"])): row["samples"] for row in rows
        }

    def estimate(self, unit: Unit, depth: Depth) -> Estimate | None:
        """Of its own starts; of one that has not started yet, of its sisters' (the same model's). None: of neither."""
        own = estimate(_seconds(self._known.get((unit, depth), ())))
        if own is not None:
            return own
        sisters = [samples for (one, deep), samples in self._known.items() if (one.model, deep) == (unit.model, depth)]
        return estimate([seconds for samples in sisters for seconds in _seconds(samples)])

    def estimates(self) -> Iterable[tuple[Unit, Depth, Estimate, Mapping[str, float]]]:
        """All that is known, with the median of each part."""
        for (unit, depth), samples in sorted(self._known.items()):
            learned = estimate(_seconds(samples))
            if learned is not None:
                yield unit, depth, learned, _medians(samples)


def _seconds(samples: Iterable[Mapping[str, Any]]) -> list[float]:
    return [float(sample["seconds"]) for sample in samples]


def _medians(samples: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    by_part: dict[str, list[float]] = {}
    for sample in samples:
        for part, seconds in sample["parts"].items():
            by_part.setdefault(part, []).append(float(seconds))
    found = {part: estimate(values) for part, values in by_part.items()}
    return {part: one.p50 for part, one in found.items() if one is not None}


def _is(unit: Unit, depth: Depth) -> sa.ColumnElement[bool]:
    starts = unit_starts.c
    same = starts.model == unit.model, starts.name == unit.name, starts.place == unit.place
    return sa.and_(*same, starts.depth == depth)
