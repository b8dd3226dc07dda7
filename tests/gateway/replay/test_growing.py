"""A day before a fleet that grows and shrinks: every request ends, engines empty before they go, and demand pays."""

from collections import Counter
from dataclasses import asdict, replace

import pytest

from gateway.lifecycle.scaling import Bounds
from gateway.replay.day_trials import DayTrial, day_report, play_day, run_day
from gateway.replay.days import Day, Shape, arrange_days
from gateway.replay.doors import Promise
from gateway.replay.growing import GrowingFleet, Grown, Starts
from gateway.replay.numbers import ByDemand, ByThresholds, Fixed, Fleet
from gateway.replay.policies import Trial, run_policy
from gateway.replay.profiles import PROFILES
from gateway.replay.requests import Fate
from gateway.replay.traces import Load
from tests.gateway.places import PagePlacing
from tests.gateway.replay.synthetic import synthetic_rows
from tests.gateway.test_door import make_door

pytestmark = pytest.mark.load  # a day of a small fleet takes seconds

SMALL = replace(PROFILES["h200-8b-bf16"], total_tokens=20_000)


def trial(*, noon: float = 8.0, seed: int = 1, day_s: float = 900.0) -> DayTrial:
    rows = synthetic_rows(600, rate=1.0, shared=True)
    load = Load(factor=noon, tenants=6, seed=seed, returning=0.0)
    return DayTrial(rows, load, SMALL, Promise(5.0, 0.05), 5, Day(day_s, 0.05), Starts(30.0, seed=seed))


@pytest.fixture(scope="module")
def by_demand() -> Grown:
    return play_day("demand", trial())


def test_every_request_ends_once_and_nothing_is_left(by_demand: Grown) -> None:
    fates = Counter(request.fate for request in by_demand.requests)
    assert set(fates) <= {Fate.FINISHED, Fate.REFUSED, Fate.EVICTED}
    assert fates[Fate.FINISHED] > 500
    assert not by_demand.door.placing.inside
    decoded = sum(unit.engine.totals.decoded_tokens for unit in by_demand.units)
    assert decoded == sum(r.output_tokens for r in by_demand.requests if r.fate is Fate.FINISHED)


def test_the_fleet_grows_into_the_day_and_shrinks_out_of_it(by_demand: Grown) -> None:
    numbers = [number for _, number, _ in by_demand.wished]
    assert max(numbers) >= 3
    assert numbers[-1] < max(numbers)
    assert all(why for _, _, why in by_demand.wished)


def test_no_engine_goes_before_its_last_answer(by_demand: Grown) -> None:
    gone = [unit for unit in by_demand.units if unit.gone_at is not None]
    assert gone
    for unit in gone:
        assert unit.engine.idle
        assert unit.engine.clock <= (unit.gone_at or 0.0) + 1e-9
        assert unit.engine.pool.used_tokens == 0


def test_nobody_is_sent_to_an_engine_that_still_starts(by_demand: Grown) -> None:
    for unit in by_demand.units:
        assert not unit.engine.totals.steps or unit.engine.clock >= unit.serves_at


def test_demand_takes_less_than_all_engines_and_keeps_more_than_thresholds(by_demand: Grown) -> None:
    demand = day_report("demand", by_demand, trial().promise)
    fixed, thresholds = run_day("fixed", trial()), run_day("thresholds", trial())
    assert demand.unit_hours <= 0.6 * fixed.unit_hours
    assert demand.good_share >= 0.99
    assert demand.good_share > thresholds.good_share
    assert demand.turns <= 1


def test_the_same_seed_gives_the_same_day_and_another_does_not() -> None:
    short = trial(day_s=150.0)
    first, again = run_day("demand", short), run_day("demand", short)
    assert asdict(first) == asdict(again)
    assert asdict(first) != asdict(run_day("demand", trial(seed=2, day_s=150.0)))


def test_one_engine_always_is_what_the_replay_of_one_engine_says() -> None:
    at, one = trial(noon=1.5, day_s=600.0), Day(600.0, 1.0)
    requests = arrange_days(at.rows, at.load, SMALL, one)
    profile = replace(SMALL, clip_tokens=128)
    fleet = GrowingFleet(profile, at.promise, Fixed(1), first=1, starts=at.starts).play(requests)
    alone = run_policy("ours", Trial(at.rows, replace(at.load, factor=1.5), SMALL, at.promise))
    kept = sum(at.promise.kept_by(request) for request in fleet.requests) / len(fleet.requests)
    assert kept == pytest.approx(alone.good_share, abs=0.02)
    assert len(fleet.units) == 1


def test_a_day_is_busy_at_noon_and_quiet_at_night() -> None:
    at, day = trial(), Day(1200.0, 0.1)
    arrived = [request.arrived_at for request in arrange_days(at.rows, at.load, SMALL, day)]
    thirds = Counter(int(second // 400) for second in arrived)
    assert max(arrived) < 1200
    assert thirds[1] > 2 * max(thirds[0], thirds[2])
    assert day.load(0.0) == pytest.approx(0.1)
    assert day.load(600.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shape", "loads"),
    [
        (Shape.BURST, [0.1, 0.1, 0.1, 0.1, 1.0, 0.1, 0.1, 0.1]),
        (Shape.RAMP, [0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.0]),
        (Shape.SQUARE, [0.1, 1.0, 0.1, 1.0, 0.1, 1.0, 0.1, 1.0]),
    ],
)
def test_a_load_bursts_ramps_or_goes_up_and_down_at_once(shape: Shape, loads: list[float]) -> None:
    day = Day(800.0, 0.1, shape=shape)
    assert [day.load(100.0 * eighth) for eighth in range(8)] == pytest.approx(loads)
    assert day.load(900.0) == pytest.approx(day.load(100.0)), "the next day"


def test_thresholds_grow_by_use_and_shrink_after_five_minutes() -> None:
    numbers = ByThresholds(Bounds(1, 8))
    door, placing = make_door(100)
    assert isinstance(placing, PagePlacing)
    placing.sites = {"place": placing._site}
    gate = placing._site.gate
    gate.free_tokens = 0.0
    assert numbers.wished(Fleet(door, 4, 0, 60.0), 0.0)[0] == 5
    gate.free_tokens = 90.0
    assert numbers.wished(Fleet(door, 5, 0, 60.0), 5.0)[0] == 5, "asked every 15 s"
    assert numbers.wished(Fleet(door, 5, 0, 60.0), 20.0)[0] == 5, "the largest of five minutes"
    assert numbers.wished(Fleet(door, 5, 0, 60.0), 330.0)[0] == 1


def test_the_service_s_own_decision_is_what_is_played() -> None:
    door, _ = make_door(4)
    number, why = ByDemand(Bounds(2, 8)).wished(Fleet(door, 0, 0, 60.0), 0.0)
    assert number == 2
    assert "at least 2" in why


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="hope"):
        run_day("hope", trial())
