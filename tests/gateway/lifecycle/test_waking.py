"""What a request is told of a model that sleeps: how long it will take, or that it can't be had; it wakes one unit."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import EngineUnavailable, ModelWarming
from gateway.lifecycle.sides import Side
from gateway.lifecycle.states import By, Depth, Record, StartLimits, State, Unit, Wish, Wished
from gateway.lifecycle.store import UnitStore
from gateway.lifecycle.waking import Unavailable, Waking, Warming, verdict, verdict_of_sides
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable
from tests.doubles.waiting import eventually
from tests.tenancy.clock import SettableClock

S = 1_000_000_000
NOW = 1_000 * S
A, B = Unit("model", "a"), Unit("model", "b")
ASLEEP = Record(A)


def start_s(unit: Unit, depth: Depth) -> tuple[float, bool]:
    """b is slower, and memory comes back sooner than a process."""
    return (20.0 if unit == B else 10.0) / (5 if depth is Depth.RELEASED else 1), True


def verdict_of(*records: Record) -> Warming | Unavailable | None:
    return verdict(records, NOW, start_s)


def test_nothing_is_said_of_a_model_that_has_no_units_or_a_ready_one() -> None:
    assert verdict_of() is None
    assert verdict_of(ASLEEP, replace(ASLEEP, unit=B, state=State.READY)) is None


def test_the_unit_that_wakes_soonest_is_woken() -> None:
    assert verdict_of(ASLEEP, replace(ASLEEP, unit=B)) == Warming(10.0, True, A)
    assert verdict_of(ASLEEP, replace(ASLEEP, unit=B, depth=Depth.RELEASED)) == Warming(4.0, True, B)


def test_one_that_is_being_woken_is_waited_for_and_no_other_is_woken() -> None:
    warming = replace(ASLEEP, wish=Wish.AWAKE, state=State.WARMING, since_ns=NOW - 4 * S)
    assert verdict_of(warming, replace(ASLEEP, unit=B)) == Warming(6.0, True)
    late = replace(warming, since_ns=NOW - 100 * S)
    assert verdict_of(late) == Warming(1.0, True)


def test_a_failed_start_is_tried_again_and_that_takes_its_pause_longer() -> None:
    pausing = replace(ASLEEP, wish=Wish.AWAKE, failures=1, retry_at_ns=NOW + 3 * S)
    assert verdict_of(pausing) == Warming(13.0, True)


def test_a_unit_that_drains_is_called_back() -> None:
    found = verdict_of(replace(ASLEEP, state=State.DRAINING))
    assert isinstance(found, Warming)
    assert found.unit == A


def test_a_unit_of_another_place_that_has_long_served_and_is_not_seen_from_here_keeps_nobody_asleep(
    database: Database, clock: SettableClock
) -> None:
    waking = Desk(database, clock).waking
    there = replace(ASLEEP, unit=Unit("model", "b", "there"), state=State.READY, wish=Wish.AWAKE, since_ns=clock())
    waking.heard(there)
    assert waking.verdict("model") is None, "it has just begun to serve"
    clock.advance_s(6)
    found = waking.verdict("model")
    assert isinstance(found, Warming)
    assert found.unit == A


async def test_whoever_has_no_queue_waits_until_it_is_awake_and_is_told_by_the_name_that_it_asked_for(
    database: Database, clock: SettableClock
) -> None:
    waking = Desk(database, clock).waking
    waits = asyncio.create_task(waking.until_awake("model", wait_s=60, among={"a"}, named="encoder"))
    await eventually(lambda: waking.records()[0].wish is Wish.AWAKE, what="a wish")
    assert not waits.done()
    waking.heard(replace(ASLEEP, version=9, wish=Wish.AWAKE, state=State.READY))
    await waits
    waking.heard(replace(ASLEEP, version=10))
    with pytest.raises(ModelWarming, match="encoder"):
        await waking.until_awake("model", wait_s=1, among={"a"}, named="encoder")


async def test_the_first_request_after_a_start_wakes_a_model_of_which_nothing_has_been_heard_yet(
    database: Database, clock: SettableClock
) -> None:
    waking = Desk(database, clock).waking
    waking.forget(A)
    assert not await waking.wake("model", wait_s=60), "a model that never sleeps is not waited for"
    waking.serve({"model": None})
    asks = asyncio.create_task(waking.wake("model", wait_s=60))
    in_a_hurry = asyncio.create_task(waking.wake("model", wait_s=0))
    assert not await in_a_hurry
    assert not asks.done()
    waking.heard(ASLEEP)
    assert await asks
    assert waking.records()[0].wish is Wish.AWAKE


async def test_a_request_wakes_one_half_of_each_side(database: Database, clock: SettableClock) -> None:
    desk = Desk(database, clock)
    more = [Unit("model", name) for name in ("b", "c", "d")]
    desk.store.add([(unit, Wish.ASLEEP) for unit in more])
    for record in desk.store.all():
        desk.waking.heard(record)
    side_of = {"a": Side.PREFILL, "b": Side.DECODE, "c": Side.PREFILL, "d": Side.DECODE}
    desk.waking.serve({"model": None}, {"model": side_of})
    await asyncio.gather(*(desk.waking.wake("model", wait_s=60) for _ in range(20)))
    woken = [record.unit.name for record in desk.store.all() if record.wish is Wish.AWAKE]
    assert sorted(side_of[name] for name in woken) == [Side.DECODE, Side.PREFILL]
    assert len(desk.news) == 2


def test_whoever_waits_is_told_the_end_of_it_only_where_nothing_else_comes(
    database: Database, clock: SettableClock
) -> None:
    desk = Desk(database, clock)
    desk.waking.heard(replace(ASLEEP, version=9, wish=Wish.AWAKE, state=State.FAILED))
    assert isinstance(desk.waking.end_of_wait("model"), EngineUnavailable)
    desk.waking.heard(replace(ASLEEP, unit=B, wish=Wish.AWAKE, state=State.WARMING, since_ns=clock()))
    assert desk.waking.end_of_wait("model") is None
    assert isinstance(desk.waking.end_of_wait("model", among={"a"}), EngineUnavailable)


def test_what_is_held_or_rests_can_not_be_had() -> None:
    held = replace(ASLEEP, wish=Wish.HELD)
    failed = replace(ASLEEP, unit=B, wish=Wish.AWAKE, state=State.FAILED, retry_at_ns=NOW + 20 * S)
    assert verdict_of(held) == Unavailable(60)
    assert verdict_of(held, failed) == Unavailable(20)
    assert verdict_of(held, replace(failed, retry_at_ns=NOW + 300 * S)) == Unavailable(60)


def test_of_halves_one_of_each_side_is_needed_and_the_later_one_is_waited_for() -> None:
    prefill, decode = ASLEEP, replace(ASLEEP, unit=B)

    def ready(record: Record) -> Record:
        return replace(record, state=State.READY, wish=Wish.AWAKE)

    def said(*sides: Record) -> Warming | Unavailable | None:
        return verdict_of_sides([[side] for side in sides], NOW, start_s)

    assert said(prefill, decode) == Warming(20.0, True, A)
    warming = replace(prefill, since_ns=NOW, state=State.WARMING, wish=Wish.AWAKE)
    assert said(warming, decode) == Warming(20.0, True, B)
    assert said(prefill, ready(decode)) == Warming(10.0, True, A), "half a model serves nobody"
    assert said(ready(prefill), ready(decode)) is None
    assert said(prefill, replace(decode, wish=Wish.HELD)) == Unavailable(60)


class Desk:
    """Waking over a real store. news: what it has wished."""

    def __init__(self, database: Database, clock: SettableClock) -> None:
        self.database = database
        self.store = UnitStore(database, lease_s=10, clock=clock, limits=StartLimits())
        self.store.add([(A, Wish.ASLEEP)])
        self.news: list[Record] = []
        self.away = False
        self.waking = Waking(self.store, self.call, start_s=start_s, wished=self.news.append, clock=clock)
        for record in self.store.all():
            self.waking.heard(record)

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.away:
            raise TenancyUnavailable("away", retry_after_s=1)
        return await self.database.call(function, *args)


@pytest.fixture
def desk(database: Database, clock: SettableClock) -> Desk:
    return Desk(database, clock)


async def test_many_requests_at_once_are_one_wish(desk: Desk) -> None:
    assert await asyncio.gather(*(desk.waking.wake("model", wait_s=30) for _ in range(50))) == [True] * 50
    assert [(record.wish, record.wish_by) for record in desk.news] == [(Wish.AWAKE, By.REQUEST)]
    assert desk.store.all()[0].version == 2


async def test_who_can_not_wait_so_long_is_told_when_and_the_model_wakes_all_the_same(desk: Desk) -> None:
    with pytest.raises(ModelWarming) as refused:
        await desk.waking.wake("model", wait_s=9)
    assert refused.value.retry_after_s == 10
    assert desk.store.all()[0].wish is Wish.AWAKE


async def test_nobody_is_refused_for_a_start_that_nobody_has_seen(database: Database, clock: SettableClock) -> None:
    desk = Desk(database, clock)
    waking = Waking(desk.store, desk.call, start_s=lambda *_: (30.0, False), wished=desk.news.append, clock=clock)
    waking.heard(desk.store.all()[0])
    assert await waking.wake("model", wait_s=9)
    with pytest.raises(ModelWarming):  # it does not want to wait at all
        await waking.wake("model", wait_s=0)


async def test_a_caller_that_leaves_takes_nobody_elses_wish_with_it(desk: Desk) -> None:
    leaving = asyncio.create_task(desk.waking.wake("model", wait_s=30))
    staying = asyncio.create_task(desk.waking.wake("model", wait_s=30))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying is True
    assert len(desk.news) == 1


async def test_what_an_operator_holds_asleep_stays_so(desk: Desk) -> None:
    held = desk.store.wish(A, Wished(Wish.HELD, By.OPERATOR))
    with pytest.raises(EngineUnavailable):  # it has not been heard of yet, and is read in wishing
        await desk.waking.wake("model", wait_s=30)
    assert desk.store.all() == [held]
    assert desk.waking.sleeps("model")


async def test_without_a_database_nothing_wakes_and_that_is_said(desk: Desk) -> None:
    desk.away = True
    with pytest.raises(EngineUnavailable):
        await desk.waking.wake("model", wait_s=30)


async def test_a_unit_that_is_no_more_is_forgotten(desk: Desk) -> None:
    desk.store.forget(A)
    assert await desk.waking.wake("model", wait_s=30) is False
    assert desk.waking.records("model") == []


async def test_a_request_wakes_a_unit_that_may_serve_it_whatever_others_do(desk: Desk) -> None:
    desk.store.add([(B, Wish.ASLEEP)])
    for record in desk.store.all():
        desk.waking.heard(record)
    desk.waking.heard(replace(desk.waking.records("model")[0], state=State.READY))
    assert await desk.waking.wake("model", wait_s=30) is False
    assert await asyncio.gather(*(desk.waking.wake("model", wait_s=30, among={"b"}) for _ in range(9))) == [True] * 9
    assert [record.unit for record in desk.news] == [B]
    assert desk.waking.refusal("model", {"a"}) is None
    assert isinstance(desk.waking.refusal("model", {"b"}), ModelWarming)


async def test_two_requests_that_may_go_to_different_units_wake_both(desk: Desk) -> None:
    desk.store.add([(B, Wish.ASLEEP)])
    for record in desk.store.all():
        desk.waking.heard(record)
    await asyncio.gather(*(desk.waking.wake("model", wait_s=30, among={name}) for name in "ab"))
    assert {record.unit for record in desk.news} == {A, B}
