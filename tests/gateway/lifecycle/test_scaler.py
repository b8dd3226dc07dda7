"""The scaler's wishes: one process decides for all, operators' wishes stand, and the last unit is the idle time's."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.door import Let
from gateway.lifecycle.demand import Half, Part
from gateway.lifecycle.demand_store import DemandStore
from gateway.lifecycle.scaler import Scaled, Scaler, changed_wishes
from gateway.lifecycle.scaling import Bounds
from gateway.lifecycle.scaling_metrics import ScalingCollector
from gateway.lifecycle.sides import Side
from gateway.lifecycle.states import By, Depth, Record, StartLimits, State, Unit, Wish, Wished
from gateway.lifecycle.store import UnitStore
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable
from tests.gateway.lifecycle.test_demand import LIMITS, POOL, door_of, want
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

MODEL = "model"
UNITS = [Unit(MODEL, f"engine-{index}") for index in range(4)]
T = TypeVar("T")


@dataclass
class Fleet:
    """One process with its door, beside units in SQL that are ready as soon as they are wished awake."""

    database: Database
    clock: SettableClock
    process: str = "a"
    bounds: Bounds | None = field(default_factory=lambda: Bounds(0, 4))
    away: bool = False

    def __post_init__(self) -> None:
        self.store = UnitStore(self.database, lease_s=15, clock=self.clock, limits=StartLimits())
        self.door = door_of()
        self.let: list[str] = []
        self.wished: list[Record] = []
        self.scaler = Scaler(
            self.store,
            DemandStore(self.database, lately_s=15, clock=self.clock),
            self.call,
            process=self.process,
            interval_s=5,
            most=64,
            models=lambda: [self.scaled()],
            wished=self.wished.append,
            clock=lambda: self.clock() / 1e9,
        )

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        if self.away:
            raise TenancyUnavailable("away")
        return function(*args)

    def scaled(self) -> Scaled:
        self.serve()
        return Scaled(MODEL, self.door, self.bounds, self.store.all(), Depth.RELEASED, start_s=30.0)

    def serve(self) -> None:
        """Whoever is wished awake serves; others do not."""
        for record in self.store.all():
            name = record.unit.name
            if record.wish is Wish.AWAKE and record.state is not State.FAILED:
                self.door.placing.join(name, POOL, 1, LIMITS)
            elif name in self.door.placing.sites:
                self.door.placing.part(name)

    def ask(self, count: int) -> None:
        self.serve()
        for number in range(count):
            answer = self.door.arrive(want(f"{self.clock()}-{number}", 3000), self.clock() / 1e9, wait_s=600)
            if isinstance(answer, Let):
                self.let.append(answer.waiting.id)

    async def turns(self, seconds: float) -> None:
        for _ in range(int(seconds / 5)):
            self.clock.advance_s(5)
            await self.scaler.turn()

    def awake(self) -> list[str]:
        return [record.unit.name for record in self.store.all() if record.wish is Wish.AWAKE]


@dataclass
class Halves(Fleet):
    """Of a group: its decode halves are the sites, its prefill halves are idle."""

    sides: dict[str, Side] = field(
        default_factory=lambda: {
            f"{side[0]}{index}": side for side in (Side.PREFILL, Side.DECODE) for index in range(4)
        }
    )
    halves: tuple[Half, ...] = (Half(0.0, POOL),)

    def scaled(self) -> Scaled:
        return replace(super().scaled(), halves=self.halves, sides=self.sides)

    def serve(self) -> None:
        super().serve()
        for name in [name for name in self.door.placing.sites if self.sides.get(name) is Side.PREFILL]:
            self.door.placing.part(name)


@pytest.fixture
def fleet(database: Database, clock: SettableClock) -> Fleet:
    made = Fleet(database, clock)
    made.store.add([(unit, Wish.AWAKE if unit is UNITS[0] else Wish.ASLEEP) for unit in UNITS])
    return made


@over_both_databases
async def test_units_are_woken_for_the_demand_and_put_to_sleep_when_it_is_gone(fleet: Fleet) -> None:
    fleet.ask(6)
    await fleet.turns(10)
    assert len(fleet.awake()) >= 3
    woken = [record for record in fleet.store.all() if record.wish_by is By.SCALER]
    assert {record.wish for record in woken} == {Wish.AWAKE}
    assert fleet.wished
    for waiting in list(fleet.door.queue):
        fleet.door.leave(waiting.item)
    for name in fleet.let:
        fleet.door.placing.stopped(name)
    await fleet.turns(900)
    asleep = [record for record in fleet.store.all() if record.wish is Wish.ASLEEP]
    assert len(asleep) == 3, "the last one is left to the idle time"
    assert {record.wish_depth for record in asleep if record.wish_by is By.SCALER} == {Depth.RELEASED}


@over_both_databases
async def test_each_side_of_a_group_is_woken_for_its_own_demand(database: Database, clock: SettableClock) -> None:
    fleet = Halves(database, clock)
    fleet.store.add([(Unit(MODEL, name, ""), Wish.AWAKE if name[1] == "0" else Wish.ASLEEP) for name in fleet.sides])
    fleet.ask(6)
    await fleet.turns(10)
    woken = Counter(fleet.sides[name] for name in fleet.awake())
    assert woken[Side.DECODE] >= 3
    assert woken[Side.PREFILL] == 1
    fleet.halves = ()
    for unit in fleet.store.all():
        fleet.store.wish(unit.unit, Wished(Wish.ASLEEP, By.IDLE))
    await fleet.turns(10)
    assert fleet.awake() == [], "of a side that sleeps no demand is seen: a request wakes it"


@over_both_databases
async def test_a_model_that_sleeps_and_is_not_asked_for_stays_asleep(fleet: Fleet) -> None:
    fleet.store.wish(UNITS[0], Wished(Wish.ASLEEP, By.IDLE))
    await fleet.turns(60)
    assert fleet.awake() == []


@over_both_databases
async def test_what_sleeps_is_not_woken_by_demand_that_is_over(fleet: Fleet) -> None:
    fleet.ask(6)
    await fleet.turns(10)
    for waiting in list(fleet.door.queue):
        fleet.door.leave(waiting.item)
    for name in fleet.let:
        fleet.door.placing.stopped(name)
    for unit in UNITS:
        fleet.store.wish(unit, Wished(Wish.ASLEEP, By.PLACEMENT))
    await fleet.turns(60)
    assert fleet.awake() == []


@over_both_databases
async def test_the_first_process_decides_by_what_all_see_and_another_when_it_has_left(
    fleet: Fleet, database: Database, clock: SettableClock
) -> None:
    other = Fleet(database, clock, process="b")
    other.ask(6)
    await other.scaler.turn()
    assert list(other.scaler.decisions) == [MODEL], "alone it decides"
    await fleet.turns(5)
    await other.turns(5)
    await fleet.turns(5)
    assert not other.scaler.decisions
    assert len(fleet.awake()) >= 3, "what waits at the other counts"
    fleet.scaler._demands.leave("a")
    await other.turns(5)
    assert list(other.scaler.decisions) == [MODEL]


@over_both_databases
async def test_a_process_that_died_decides_no_more(fleet: Fleet, database: Database, clock: SettableClock) -> None:
    other = Fleet(database, clock, process="b")
    await fleet.turns(5)
    await other.turns(5)
    assert not other.scaler.decisions
    clock.advance_s(20)
    await other.scaler.turn()
    assert list(other.scaler.decisions) == [MODEL]


@over_both_databases
async def test_what_an_operator_sent_to_sleep_is_not_woken(fleet: Fleet) -> None:
    fleet.store.wish(UNITS[1], Wished(Wish.HELD, By.OPERATOR))
    fleet.store.wish(UNITS[2], Wished(Wish.ASLEEP, By.OPERATOR))
    fleet.ask(30)
    await fleet.turns(60)
    assert fleet.awake() == ["engine-0", "engine-3"]


@over_both_databases
async def test_what_an_operator_has_woken_is_not_put_to_sleep(fleet: Fleet) -> None:
    for unit in UNITS:
        fleet.store.wish(unit, Wished(Wish.AWAKE, By.OPERATOR))
    await fleet.turns(900)
    assert len(fleet.awake()) == 4


@over_both_databases
async def test_while_the_database_is_away_nothing_is_wished(fleet: Fleet) -> None:
    fleet.away = True
    fleet.ask(30)
    with pytest.raises(TenancyUnavailable):
        await fleet.turns(5)
    fleet.away = False
    await fleet.turns(10)
    assert len(fleet.awake()) == 4


@over_both_databases
async def test_a_part_is_read_as_it_was_written_and_old_ones_go(database: Database, clock: SettableClock) -> None:
    store = DemandStore(database, lately_s=15, clock=clock)
    part = Part(serving=2, replica=POOL, peak=12.5, wait_s=0.25)
    assert store.exchange("a", {MODEL: part}) == {MODEL: {"a": part}}
    said = store.exchange("b", {MODEL: Part(), "else": Part()})
    assert said == {MODEL: {"a": part, "b": Part()}, "else": {"b": Part()}}
    clock.advance_s(16)
    assert store.exchange("a", {MODEL: Part()}) == {MODEL: {"a": Part()}}


@over_both_databases
async def test_wished_replicas_are_a_metric_also_where_something_else_starts_engines(fleet: Fleet) -> None:
    fleet.bounds = None
    registry = CollectorRegistry()
    registry.register(ScalingCollector(fleet.scaler.decisions))
    fleet.ask(12)
    await fleet.turns(10)
    text = generate_latest(registry).decode()
    decided = fleet.scaler.decisions[MODEL].wished[Side.UNIFIED]
    assert f'pagegate_wished_replicas{{model="model",side="unified"}} {decided.replicas:.1f}' in text
    assert decided.replicas > 1
    assert 'pagegate_kv_demand_share{model="model",side="unified"}' in text
    assert fleet.awake() == ["engine-0"]


def record(name: str, **changes: Any) -> Record:
    return replace(Record(Unit(MODEL, name), wish=Wish.AWAKE, state=State.READY, wish_by=By.SCALER), **changes)


def test_one_that_failed_too_often_is_replaced_by_another() -> None:
    found = changed_wishes([record("a", state=State.FAILED), record("b", wish=Wish.ASLEEP, state=State.ASLEEP)], 1, {})
    assert found == [(Unit(MODEL, "b"), Wish.AWAKE)]


def test_one_that_kept_its_process_is_woken_first() -> None:
    asleep = {"wish": Wish.ASLEEP, "state": State.ASLEEP}
    found = changed_wishes([record("a", **asleep), record("b", **asleep, depth=Depth.RELEASED)], 1, {})
    assert found == [(Unit(MODEL, "b"), Wish.AWAKE)]


def test_one_that_still_starts_sleeps_first_and_then_the_emptiest() -> None:
    there = [record("a"), record("b"), record("c", state=State.WARMING)]
    found = changed_wishes(there, 1, {"a": 10.0, "b": 500.0})
    assert found == [(Unit(MODEL, "c"), Wish.ASLEEP), (Unit(MODEL, "a"), Wish.ASLEEP)]


def test_as_many_as_are_wished_change_nothing() -> None:
    assert changed_wishes([record("a"), record("b")], 2, {}) == []
