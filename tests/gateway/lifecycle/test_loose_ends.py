"""What a failed start, a death or a dead owner leaves of a unit does not go on running while the unit is to sleep."""

from dataclasses import dataclass

import pytest

from gateway.lifecycle.states import (
    Answered,
    Begun,
    By,
    Closed,
    Event,
    Failed,
    StartLimits,
    State,
    Wish,
    Wished,
    advance,
)
from tenancy.database import Database
from tests.doubles.waiting import eventually
from tests.gateway.lifecycle.house import A, Engine, House
from tests.tenancy.clock import SettableClock


@dataclass
class Pair(Engine):
    """An engine of two halves: one of them always starts, and goes on when the other has died."""

    half: bool = False

    async def start(self) -> None:
        self.half = True
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        self.half = False


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def house(database: Database, clock: SettableClock, pair: Pair) -> House:
    house = House(database, clock)
    house.engine = pair
    return house


async def test_what_has_started_of_a_unit_that_fails_is_stopped_while_it_rests(house: House, pair: Pair) -> None:
    pair.fails = "no such program"
    async with house.kept():
        for failures in (1, 2):
            await eventually(lambda: house.told.bad == failures, what="a failed start")  # noqa: B023 - it is awaited here
            assert pair.half, "its next start comes soon"
            house.clock.advance_s(2)
        await house.comes_to(State.FAILED)
        await eventually(lambda: not pair.half, what="a half that is stopped")
        pair.fails = ""
        house.store.wish(A, Wished(Wish.AWAKE, By.OPERATOR))
        await house.comes_to(State.READY)


async def test_what_has_started_of_a_unit_is_stopped_when_it_is_wished_asleep_before_its_next_start(
    house: House, pair: Pair
) -> None:
    pair.fails = "no such program"
    async with house.kept():
        await eventually(lambda: house.told.bad == 1, what="a failed start")
        house.store.wish(A, Wished(Wish.HELD, By.OPERATOR))
        await eventually(lambda: not pair.half, what="a half that is stopped")
        house.clock.advance_s(2)
        assert house.record.state is State.ASLEEP
    assert pair.starts == 1


async def test_of_a_unit_that_dies_while_it_drains_the_other_half_ends_its_work_and_is_stopped(
    house: House, pair: Pair
) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        pair.works = True
        house.store.wish(A, Wished(Wish.HELD, By.OPERATOR))
        await house.comes_to(State.DRAINING)
        pair.runs = False
        looks = house.calls["of"]
        await eventually(lambda: house.calls["of"] > looks + 10, what="some looks")
        assert pair.half, "a stream still runs there"
        pair.works = False
        await eventually(lambda: not pair.half, what="a half that is stopped")
        await house.comes_to(State.ASLEEP)
    assert (house.record.failures, pair.starts) == (0, 1)


@pytest.mark.parametrize(
    "events",
    [
        (Begun(),),
        (Begun(), Answered(), Closed()),
        (Begun(), Failed("it broke")),
        (Begun(), Failed("it broke"), Begun(), Failed("it broke"), Begun(), Failed("it broke")),
    ],
    ids=["warming", "draining", "pausing", "failed"],
)
async def test_a_new_owner_ends_what_the_last_one_left_of_a_unit_that_is_to_sleep(
    house: House, pair: Pair, events: tuple[Event, ...]
) -> None:
    house.store.add([(A, Wish.AWAKE)])
    record = house.store.take(A, "dead")
    for event in events:
        assert record is not None
        record = house.store.save(record, advance(record, event, house.clock(), StartLimits(failures_max=3)))
    house.store.wish(A, Wished(Wish.HELD, By.OPERATOR))
    pair.half = True
    house.store.free_place(A.place)
    async with house.kept(owner="next"):
        await eventually(lambda: not pair.half, what="nothing that runs")
        assert house.record.state in {State.ASLEEP, State.FAILED}
    assert pair.starts == 0
