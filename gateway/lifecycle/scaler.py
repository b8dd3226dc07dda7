"""Wishes as many units of a model awake as scaling.py says. A task of every process; one of them decides for a model.

Each process says every few seconds what it sees of the demand (demand_store.py); the first by name decides, and its
wishes are carried out by whoever keeps the units. It wakes no unit that an operator has sent to sleep, and puts none to
sleep that an operator has woken. The last unit awake is left to the idle time, and the first to the request that needs
it: demand that is over would wake again what was put to sleep for another model.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from gateway.door import Door
from gateway.lifecycle.demand import Demand, Half, Part, together
from gateway.lifecycle.demand_store import DemandStore
from gateway.lifecycle.scaling import Bounds, ModelScaling, ScalingRules, Seen, Wished, units
from gateway.lifecycle.sides import Side, by_side
from gateway.lifecycle.states import By, Depth, Record, State, Unit, Wish
from gateway.lifecycle.states import Wished as Wishing
from gateway.lifecycle.store import Call, UnitStore
from tenancy.errors import TenancyUnavailable

log = structlog.get_logger(__name__)

_LEAVE_S_MAX: Final = 2.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """One model. bounds: of its units; None where this service starts and stops none of them: then the answer is only
    said; of a group they are each side's. depth: how a unit sleeps that is not needed. records: its units as last heard
    of. start_s: of the next one to start, nine times out of ten. held: what runs at a unit now, in tokens, to stop the
    emptiest. sides: of a group, whose units are halves, by unit.
    """

    model: str
    door: Door
    bounds: Bounds | None
    records: Sequence[Record] = ()
    depth: Depth = Depth.STOPPED
    start_s: float = 60.0
    halves: Sequence[Half] = ()
    held: Mapping[str, float] = field(default_factory=dict)
    sides: Mapping[str, Side] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was last decided for a model by this process, and by what."""

    seen: Mapping[Side, Seen]
    wished: Mapping[Side, Wished]


@dataclass(slots=True)
class _Model:
    demand: Demand
    door: Door
    scaling: ModelScaling


class Scaler:
    """process: its name among those that serve the same models. most: where `bounds` is None. models: read at each
    turn. wished: told of each record that a wish has changed. decisions: of the models that this process decides for.
    """

    def __init__(
        self,
        store: UnitStore,
        demands: DemandStore,
        call: Call,
        *,
        process: str,
        interval_s: float,
        most: int,
        models: Callable[[], Iterable[Scaled]],
        wished: Callable[[Record], None],
        clock: Callable[[], float],
        rules: ScalingRules | None = None,
    ) -> None:
        self._store = store
        self._demands = demands
        self._call = call
        self._process = process
        self._interval_s = interval_s
        self._most = most
        self._read_models = models
        self._wished = wished
        self._clock = clock
        self._rules = rules
        self._models: dict[str, _Model] = {}
        self.decisions: dict[str, Decision] = {}

    async def run(self) -> None:
        """Until cancelled. While the database is away nothing is wished."""
        try:
            while True:
                with suppress(TenancyUnavailable):
                    await self.turn()
                await asyncio.sleep(self._interval_s)
        finally:
            with suppress(TimeoutError, TenancyUnavailable):
                async with asyncio.timeout(_LEAVE_S_MAX):
                    await self._call(self._demands.leave, self._process)

    async def turn(self) -> None:
        """Say what is seen, and decide where that is this process's part. Raises TenancyUnavailable."""
        models = {one.model: one for one in self._read_models()}
        for gone in self._models.keys() - models.keys():
            del self._models[gone]
            self.decisions.pop(gone, None)
        now = self._clock()
        parts = {name: self._of(one).demand.part(now, halves=one.halves) for name, one in models.items()}
        everybody = await self._call(self._demands.exchange, self._process, parts)
        for name, one in models.items():
            if min(everybody[name]) == self._process:
                await self._decide(one, everybody[name].values(), now)
            else:
                # Whoever decides again later has not watched meanwhile, and begins to.
                self._models[name].scaling = ModelScaling(self._rules)
                self.decisions.pop(name, None)

    def _of(self, one: Scaled) -> _Model:
        known = self._models.get(one.model)
        if known is None or known.door is not one.door:
            known = self._models[one.model] = _Model(Demand(one.door), one.door, ModelScaling(self._rules))
        return known

    async def _decide(self, one: Scaled, parts: Collection[Part], now: float) -> None:
        if one.sides and one.bounds is not None:
            await self._decide_sides(one, one.bounds, parts, now)
            return
        awake = awake_of(one.records) if one.bounds is not None else None
        seen = together(parts, awake=None if awake is None else len(awake), start_s=one.start_s)
        bounds = one.bounds or Bounds(1, self._most)
        if awake is not None:
            bounds = _but_the_last(bounds, awake=bool(awake))
        wished = self._models[one.model].scaling.decide(seen, bounds, now)
        before = self.decisions.get(one.model)
        self.decisions[one.model] = Decision(seen, wished)
        if awake is None:
            return
        number = units(wished)
        changed = before is None or units(before.wished) != number
        await self._wish(one, one.records, number, said=changed)

    async def _decide_sides(self, one: Scaled, bounds: Bounds, parts: Collection[Part], now: float) -> None:
        """Each side by its own demand. While all halves of one sleep there is none to be seen: a request wakes them."""
        apart = by_side(one.records, one.sides)
        awake = {side: awake_of(records) for side, records in apart.items()}
        seen = together(parts, awake=None, start_s=one.start_s)
        if seen.keys() != awake.keys():
            return
        seen = {side: replace(each, awake=len(awake[side])) for side, each in seen.items()}
        allowed = {
            side: _but_the_last(within(bounds, len(records)), awake=bool(awake[side]))
            for side, records in apart.items()
        }
        wished = self._models[one.model].scaling.decide(seen, allowed, now)
        before = self.decisions.get(one.model)
        self.decisions[one.model] = Decision(seen, wished)
        for side, number in wished.items():
            changed = before is None or before.wished.get(side) != number
            await self._wish(one, apart[side], number, said=changed, side=side)

    async def _wish(
        self, one: Scaled, records: Sequence[Record], number: Wished, *, said: bool, side: Side = Side.UNIFIED
    ) -> None:
        """That so many of these are awake. said: it is news."""
        changes = changed_wishes(records, number.replicas, one.held)
        if changes and said:
            awake = len(awake_of(records))
            log.info("scaling", model=one.model, side=side, awake=awake, wished=number.replicas, why=number.why)
        for unit, wish in changes:
            record = await self._call(self._store.wish, unit, Wishing(wish, By.SCALER, one.depth))
            if record is not None:
                self._wished(record)


def within(bounds: Bounds, known: int) -> Bounds:
    """Of so many units there are."""
    return Bounds(min(known, bounds.least), min(known, bounds.most))


def _but_the_last(bounds: Bounds, *, awake: bool) -> Bounds:
    """The last unit awake is left to the idle time, and the first to the request that needs it. awake: is any?"""
    if awake:
        return replace(bounds, least=max(1, bounds.least), most=max(1, bounds.most))
    return replace(bounds, most=bounds.least)


def awake_of(records: Iterable[Record]) -> list[Record]:
    """Units that serve or will. One that rests after too many failures does neither."""
    return [record for record in records if record.wish is Wish.AWAKE and record.state is not State.FAILED]


def changed_wishes(records: Sequence[Record], number: int, held: Mapping[str, float]) -> list[tuple[Unit, Wish]]:
    """Which units to wake or put to sleep so that so many are awake, as far as operators leave it to us."""
    awake = awake_of(records)
    missing = number - len(awake)
    if missing > 0:
        asleep = [
            record
            for record in records
            if record.wish is Wish.ASLEEP and record.wish_by is not By.OPERATOR and record.state is not State.FAILED
        ]
        asleep.sort(key=lambda record: (record.depth is not Depth.RELEASED, record.retry_at_ns, record.unit))
        return [(record.unit, Wish.AWAKE) for record in asleep[:missing]]
    # Who still starts first, the last one begun before the others; then whoever has least to do.
    ours = [record for record in awake if record.wish_by is not By.OPERATOR]
    ours.sort(key=lambda record: (record.state is State.READY, held.get(record.unit.name, 0.0), -record.wish_since_ns))
    return [(record.unit, Wish.ASLEEP) for record in ours[: max(0, -missing)]]
