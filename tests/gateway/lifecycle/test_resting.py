"""Idle units are put to sleep by whoever looks, unless any process has seen them used; and schedules wake them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from backends.serverless import Serverless
from gateway.lifecycle.resting import Resting, Sleeper
from gateway.lifecycle.states import (
    Answered,
    Begun,
    By,
    Depth,
    Record,
    StartLimits,
    State,
    Unit,
    Wish,
    Wished,
    advance,
)
from gateway.lifecycle.store import UnitStore
from gateway.lifecycle.uses import UseStore
from tenancy.database import Database
from tests.tenancy.clock import SettableClock

A = Unit("m", "a", "here")


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@dataclass
class Process:
    """One gateway process's task, and what it sees."""

    store: UnitStore
    database: Database
    clock: SettableClock
    serverless: Serverless
    seen: dict[str, Any] = field(default_factory=dict)
    wished: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.resting = Resting(
            self.store,
            UseStore(self.database),
            at_once,
            interval_s=1,
            models=lambda: [Sleeper("m", self.serverless, self.store.all(), **self.seen)],
            wished=self.wished.append,
            clock=self.clock,
        )

    async def turn(self, *, after_s: float = 0, **seen: Any) -> Record:
        """The unit as it then stands."""
        self.clock.advance_s(after_s)
        self.seen = seen
        await self.resting.turn()
        [record] = self.store.of([A])
        return record


@pytest.fixture
def store(database: Database, clock: SettableClock) -> UnitStore:
    """With one unit that has just become ready."""
    limits = StartLimits()
    store = UnitStore(database, lease_s=1000, clock=clock, limits=limits)
    store.add([(A, Wish.ASLEEP)])
    store.wish(A, Wished(Wish.AWAKE, By.REQUEST))
    record = store.take(A, "keeper")
    for event in (Begun(), Answered()):
        assert record is not None
        record = store.save(record, advance(record, event, clock(), limits))
    return store


@pytest.fixture
def process(store: UnitStore, database: Database, clock: SettableClock) -> Callable[..., Process]:
    def make(**fields: Any) -> Process:
        return Process(store, database, clock, Serverless.model_validate({"idle_seconds": 60} | fields))

    return make


async def test_one_that_nobody_uses_is_put_to_sleep_once(process: Callable[..., Process]) -> None:
    one = process(depth="released")
    assert (await one.turn(after_s=59)).wish is Wish.AWAKE
    record = await one.turn(after_s=1)
    assert (record.wish, record.wish_by, record.wish_depth) == (Wish.ASLEEP, By.IDLE, Depth.RELEASED)
    assert one.wished == [record]
    assert (await one.turn(after_s=1)).version == record.version


async def test_what_runs_waits_or_has_ended_since_counts_as_use(process: Callable[..., Process]) -> None:
    one = process()
    await one.turn(after_s=50, busy=frozenset({"a"}))
    await one.turn(after_s=50, ended={"a": 1})  # a request that came and went between two looks
    await one.turn(after_s=50, ended={"a": 2})
    assert (await one.turn(after_s=59, ended={"a": 2})).wish is Wish.AWAKE
    assert (await one.turn(after_s=1, ended={"a": 2}, waiting=True)).wish is Wish.AWAKE
    assert (await one.turn(ended={"a": 2})).wish is Wish.ASLEEP


async def test_what_another_process_uses_stays_awake(process: Callable[..., Process]) -> None:
    one, other = process(), process()
    await other.turn(after_s=55, busy=frozenset({"a"}))
    assert (await one.turn(after_s=55)).wish is Wish.AWAKE
    assert (await one.turn(after_s=5)).wish is Wish.ASLEEP


async def test_a_use_is_remembered_over_a_restart(process: Callable[..., Process]) -> None:
    await process().turn(after_s=55, busy=frozenset({"a"}))
    after = process()
    assert (await after.turn(after_s=59)).wish is Wish.AWAKE
    assert (await after.turn(after_s=1)).wish is Wish.ASLEEP


async def test_a_schedule_keeps_it_awake_and_wakes_it(process: Callable[..., Process], store: UnitStore) -> None:
    always = {"from": "00:00", "to": "24:00", "replicas_min": 1}
    scheduled = process(schedules=[always])
    assert (await scheduled.turn(after_s=1000)).wish is Wish.AWAKE
    store.wish(A, Wished(Wish.ASLEEP, By.IDLE))
    woken = await scheduled.turn()
    assert (woken.wish, woken.wish_by) == (Wish.AWAKE, By.SCHEDULE)


async def test_what_an_operator_holds_asleep_is_not_woken(process: Callable[..., Process], store: UnitStore) -> None:
    store.wish(A, Wished(Wish.HELD, By.OPERATOR))
    one = process(replicas_min=1)
    assert (await one.turn()).wish is Wish.HELD
    assert one.wished == []


async def test_a_unit_that_still_wakes_is_left(database: Database, clock: SettableClock) -> None:
    store = UnitStore(database, lease_s=1000, clock=clock, limits=StartLimits())
    store.add([(A, Wish.AWAKE)])
    taken = store.take(A, "keeper")
    assert taken is not None
    store.save(taken, advance(taken, Begun(), clock(), StartLimits()))
    one = Process(store, database, clock, Serverless(idle_seconds=60))
    assert (await one.turn(after_s=1000)).state is State.WARMING
    assert one.wished == []
