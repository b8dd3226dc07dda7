"""A keeper does what is wished, writes before it acts, and leaves nothing running that nobody keeps."""

import pytest

from gateway.lifecycle.book import Wanted
from gateway.lifecycle.driver import Driver
from gateway.lifecycle.states import Begun, By, Depth, StartLimits, State, Unit, Wish, Wished, advance
from tenancy.database import Database
from tests.doubles.waiting import eventually
from tests.gateway.lifecycle.house import SETTINGS, A, Engine, House, Told, running
from tests.tenancy.clock import SettableClock


@pytest.fixture
def house(database: Database, clock: SettableClock) -> House:
    return House(database, clock)


def test_the_engine_of_these_tests_is_a_driver() -> None:
    driver: Driver = Engine()
    assert driver


async def test_a_unit_wakes_sleeps_and_wakes_as_it_is_wished(house: House) -> None:
    async with house.kept(Wish.ASLEEP):
        await house.comes_to(State.ASLEEP)
        house.store.wish(A, Wished(Wish.AWAKE, By.REQUEST))
        await house.comes_to(State.READY)
        house.store.wish(A, Wished(Wish.ASLEEP, By.IDLE))
        await house.comes_to(State.ASLEEP)
        assert not house.engine.runs
        house.store.wish(A, Wished(Wish.AWAKE, By.REQUEST))
        await house.comes_to(State.READY)
        # It is written before it is told.
        await eventually(lambda: house.told == Told(begun=2, good=2), what="two good starts")


async def test_how_long_a_start_took_is_learned_by_how_deep_the_sleep_was(house: House) -> None:
    house.engine.answers = False
    async with house.kept():
        await house.comes_to(State.WARMING)
        house.clock.advance_s(6)
        house.engine.answers = True
        await house.comes_to(State.READY)
        await eventually(lambda: house.times.estimate(A, Depth.STOPPED) is not None, what="a start to learn from")
        learned = house.times.estimate(A, Depth.STOPPED)
        assert learned is not None
        assert (learned.samples, learned.p50) == (1, 6.0)
        assert house.times.estimate(A, Depth.RELEASED) is None


async def test_what_runs_ends_before_its_engine_is_stopped(house: House) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        house.engine.works = True
        house.store.wish(A, Wished(Wish.ASLEEP, By.OPERATOR))
        await house.comes_to(State.DRAINING)
        assert "stop" not in house.engine.said
        house.engine.works = False
        await house.comes_to(State.ASLEEP)
        assert not house.engine.runs


async def test_what_runs_too_long_is_not_waited_for(house: House) -> None:
    async with house.kept(drain_s=5):
        await house.comes_to(State.READY)
        house.engine.works = True
        house.store.wish(A, Wished(Wish.ASLEEP, By.OPERATOR))
        await house.comes_to(State.DRAINING)
        house.clock.advance_s(6)
        await house.comes_to(State.ASLEEP)


async def test_one_that_is_wanted_again_while_it_drains_goes_on_without_a_start(house: House) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        house.engine.works = True
        house.store.wish(A, Wished(Wish.ASLEEP, By.IDLE))
        await house.comes_to(State.DRAINING)
        house.store.wish(A, Wished(Wish.AWAKE, By.REQUEST))
        await house.comes_to(State.READY)
        assert house.engine.starts == 1


async def test_memory_is_released_and_taken_back_and_one_that_can_not_is_stopped(house: House) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        house.store.wish(A, Wished(Wish.ASLEEP, By.IDLE, Depth.RELEASED))
        await house.comes_to(State.ASLEEP)
        assert (house.record.depth, house.engine.runs) == (Depth.RELEASED, True)
        house.store.wish(A, Wished(Wish.AWAKE, By.REQUEST))
        await house.comes_to(State.READY)
        house.engine.fails = "no memory saver"
        house.store.wish(A, Wished(Wish.ASLEEP, By.IDLE, Depth.RELEASED))
        await house.comes_to(State.ASLEEP)
        assert house.record.depth is Depth.STOPPED
    assert house.engine.said == ["start", "release", "resume", "release", "stop", "leave"]


async def test_an_engine_that_neither_takes_its_memory_back_nor_stops_has_failed_and_the_keeper_goes_on(
    house: House,
) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        house.store.wish(A, Wished(Wish.ASLEEP, By.IDLE, Depth.RELEASED))
        await house.comes_to(State.ASLEEP)
        house.engine.fails, house.engine.stuck = "no memory", "it hangs"
        house.store.wish(A, Wished(Wish.AWAKE, By.REQUEST))
        await eventually(lambda: house.told.bad == 1, what="a failed start")
        assert house.record.why == "no memory; it hangs"
        house.engine.fails, house.engine.stuck, house.engine.runs = "", "", False
        house.clock.advance_s(1)
        await house.comes_to(State.READY)


async def test_memory_that_was_released_as_the_database_went_away_is_taken_back_by_the_next_wish(house: House) -> None:
    unit = Unit("model", "shared")

    async def released() -> None:
        house.engine.said.append("release")
        house.away = True

    house.engine.release = released  # type: ignore[method-assign]  # in this one test
    keeper = house.keeper()
    keeper.want({unit: Wanted(house.engine, Wish.AWAKE)})
    async with running(keeper):
        await eventually(lambda: house.told.good == 1, what="a good start")
        house.store.wish(unit, Wished(Wish.ASLEEP, By.IDLE, Depth.RELEASED))
        await eventually(lambda: house.away, what="a release")
        house.store.wish(unit, Wished(Wish.AWAKE, By.REQUEST))  # by somebody whose database answers
        house.away = False
        await eventually(lambda: "resume" in house.engine.said, what="memory that is taken back")
        await eventually(lambda: house.told.good == 2, what="another good start")
    assert house.engine.said == ["start", "release", "resume", "leave"]


async def test_a_start_that_fails_is_tried_again_after_a_pause_and_at_last_rests(house: House) -> None:
    house.engine.fails = "no such program"
    async with house.kept():
        await eventually(lambda: house.told.bad == 1, what="a failed start")
        assert (house.record.state, house.record.why, house.engine.starts) == (State.ASLEEP, "no such program", 1)
        house.clock.advance_s(1)
        await eventually(lambda: house.told.bad == 2, what="another")
        house.clock.advance_s(2)
        await house.comes_to(State.FAILED)
        assert (house.record.failures, house.engine.starts) == (3, 3)
        house.engine.fails = ""
        house.store.wish(A, Wished(Wish.AWAKE, By.OPERATOR))
        await house.comes_to(State.READY)


async def test_an_engine_that_is_never_ready_has_failed(house: House) -> None:
    house.engine.answers = False
    async with house.kept():
        await house.comes_to(State.WARMING)
        house.clock.advance_s(SETTINGS.start_seconds_max + 1)
        await eventually(lambda: house.told.bad == 1, what="a failed start")
        assert house.record.why == "it was not ready after 900 s. exit code 3"
        assert not house.engine.runs


async def test_an_engine_that_dies_is_started_again(house: House) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        house.engine.runs = False
        await eventually(lambda: house.told.bad == 1, what="that it has died")
        assert house.record.why == "exit code 3"
        house.clock.advance_s(1)
        await house.comes_to(State.READY)
        assert house.engine.starts == 2


async def test_whoever_leaves_stops_what_would_end_with_it_and_is_not_waited_for(house: House) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
    assert (house.record.state, house.record.owner, house.record.wish) == (State.ASLEEP, None, Wish.AWAKE)
    async with house.kept(owner="next"):
        await house.comes_to(State.READY)


async def test_a_unit_is_taken_over_when_its_owners_lease_has_ended_and_not_before(house: House) -> None:
    house.store.add([(A, Wish.AWAKE)])
    dead = house.store.take(A, "dead")
    assert dead is not None
    house.store.save(dead, advance(dead, Begun(), house.clock(), StartLimits()))
    async with house.kept():
        # Many looks at it, and not one start: it may be starting there. And nothing is written to find that out again.
        seen = house.calls["of"]
        await eventually(lambda: house.calls["of"] > seen + 5, what="some looks")
        tried = house.calls["take"]
        seen = house.calls["of"]
        await eventually(lambda: house.calls["of"] > seen + 20, what="many looks")
        assert house.calls["take"] == tried
        assert house.engine.said == []
        house.clock.advance_s(11)
        await house.comes_to(State.READY)
    assert house.engine.starts == 1


async def test_a_unit_that_is_taken_over_while_its_driver_is_at_work_is_the_others_and_its_keeper_goes_on(
    house: House,
) -> None:
    house.engine.answers = False
    async with house.kept():
        await house.comes_to(State.WARMING)
        house.engine.hold.clear()
        await eventually(lambda: house.engine.held, what="a look at the engine")
        house.clock.advance_s(11)
        taken = house.store.take(A, "other")
        assert taken is not None
        seen = house.calls["of"]
        await eventually(lambda: house.calls["of"] > seen + 2, what="that it was heard of")
        house.engine.answers = True
        house.engine.hold.set()
        seen = house.calls["of"]
        await eventually(lambda: house.calls["of"] > seen + 5, what="a keeper that goes on")
        assert house.record.owner == "other"
        house.store.free(taken)
        await house.comes_to(State.READY)


async def test_a_unit_that_somebody_has_forgotten_while_it_drained_is_named_and_kept_again(house: House) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        house.engine.works = True
        house.store.wish(A, Wished(Wish.ASLEEP, By.IDLE))
        await house.comes_to(State.DRAINING)
        house.store.forget(A)
        house.engine.works = False
        await eventually(lambda: not house.engine.runs, what="a stopped engine")
        await house.comes_to(State.READY)  # as the deployment has it
        assert house.engine.starts == 2


async def test_an_engine_that_runs_although_it_should_sleep_is_ended_by_a_new_owner(house: House) -> None:
    house.engine.runs = True
    async with house.kept(Wish.ASLEEP):
        await eventually(lambda: not house.engine.runs, what="a stopped engine")
    assert house.engine.starts == 0


async def test_two_keepers_of_one_unit_start_it_once(house: House) -> None:
    async with house.kept(owner="one"), house.kept(owner="other"):
        await house.comes_to(State.READY)
    assert house.told.begun == 1


async def test_without_a_database_an_engine_that_dies_is_started_again_and_that_is_written_later(house: House) -> None:
    async with house.kept():
        await house.comes_to(State.READY)
        house.away = True
        house.engine.runs = False
        house.clock.advance_s(100)
        await eventually(lambda: house.told.bad == 1, what="that it has died")
        house.clock.advance_s(100)
        await eventually(lambda: house.told.good == 2, what="another start")
        house.store.wish(A, Wished(Wish.AWAKE, By.OPERATOR))  # by somebody whose database answers
        house.away = False
        await eventually(lambda: bool(house.record.why), what="that it was written")
        assert (house.record.state, house.record.wish_by) == (State.READY, By.OPERATOR)


async def test_a_unit_that_is_no_longer_deployed_ends_and_is_forgotten(house: House) -> None:
    async with house.kept() as keeper:
        await house.comes_to(State.READY)
        house.engine.works = True
        keeper.want({})
        for _ in range(20):
            await house.call(house.store.of, [A])
        assert house.engine.runs
        house.engine.works = False
        await eventually(lambda: not house.store.of([A]), what="a forgotten unit")
        assert not house.engine.runs


async def test_a_unit_with_another_driver_is_started_anew_and_the_old_one_ends(house: House) -> None:
    async with house.kept() as keeper:
        await house.comes_to(State.READY)
        other = Engine()
        keeper.want({A: Wanted(other, Wish.AWAKE, driven_by="other flags")})
        await eventually(lambda: other.runs and not house.engine.runs, what="the other engine alone")
        await house.comes_to(State.READY)
        assert not other.works
