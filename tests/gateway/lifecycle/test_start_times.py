"""How long a start takes: what few samples can say, what is remembered over a restart, and of whom."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.lifecycle.metrics import StartTimesCollector
from gateway.lifecycle.start_times import KEPT, Estimate, Start, StartTimes, estimate
from gateway.lifecycle.states import Depth, StartLimits, Unit, Wish
from gateway.lifecycle.store import UnitStore
from tenancy.database import Database
from tests.examples import examples
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

A, B, OTHER = Unit("m", "a", "here"), Unit("m", "b", "here"), Unit("n", "a", "here")


class TestEstimates:
    def test_without_a_start_nothing_is_known(self) -> None:
        assert estimate([]) is None

    def test_one_start_is_a_guess_that_says_so(self) -> None:
        assert estimate([10.0]) == Estimate(samples=1, p50=10.0, p90=15.0)

    @pytest.mark.parametrize(("number", "largest"), [(2, 4 / 3), (4, 6 / 5), (8, 10 / 9), (9, 1.0), (18, 1.0)])
    def test_the_guess_shrinks_to_the_largest_as_starts_are_seen(self, number: int, largest: float) -> None:
        found = estimate([1.0] * number)
        assert found is not None
        assert found.p90 == pytest.approx(largest)

    def test_from_many_the_slowest_tenth_is_left_out(self) -> None:
        found = estimate([float(number) for number in range(1, 20)])
        assert found == Estimate(samples=19, p50=10.0, p90=18.0)

    def test_nine_starts_in_ten_are_over_before_it(self) -> None:
        chance = random.Random(3)
        late = total = 0
        for _ in range(2000):
            starts = [chance.lognormvariate(1.0, 0.5) for _ in range(12)]
            found = estimate(starts[:-1])
            assert found is not None
            late += starts[-1] > found.p90
            total += 1
        assert late / total == pytest.approx(0.1, abs=0.03)

    @settings(max_examples=examples(50))
    @given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=40))
    def test_it_is_never_below_the_middle_nor_far_beyond_what_was_seen(self, seconds: list[float]) -> None:
        found = estimate(seconds)
        assert found is not None
        assert min(seconds) <= found.p50 <= found.p90 <= 1.5 * max(seconds)


@over_both_databases
class TestMemory:
    def test_what_was_noted_is_known_here_at_once_and_elsewhere_when_it_is_read(self, database: Database) -> None:
        ours, others = StartTimes(database), StartTimes(database)
        ours.note(Start(A, Depth.STOPPED, 8.0, {"imports": 5.0}))
        ours.note(Start(A, Depth.STOPPED, 4.0, {"imports": 3.0, "weights": 1.0}))
        ours.note(Start(A, Depth.RELEASED, 1.0))
        assert others.estimate(A, Depth.STOPPED) is None
        others.load(["here"])
        assert list(others.estimates()) == list(ours.estimates())
        released, stopped = others.estimates()
        assert stopped == (A, Depth.STOPPED, Estimate(2, 6.0, 8.0 * 4 / 3), {"imports": 4.0, "weights": 1.0})
        assert released[:3] == (A, Depth.RELEASED, Estimate(1, 1.0, 1.5))

    def test_the_latest_starts_count_alone(self, database: Database) -> None:
        times = StartTimes(database)
        for number in range(KEPT + 10):
            times.note(Start(A, Depth.STOPPED, 100.0 if number < 10 else 1.0))
        assert times.estimate(A, Depth.STOPPED) == Estimate(KEPT, 1.0, 1.0)

    def test_one_that_never_started_is_taken_to_be_as_its_sisters(self, database: Database) -> None:
        times = StartTimes(database)
        times.note(Start(A, Depth.STOPPED, 4.0))
        times.note(Start(OTHER, Depth.STOPPED, 90.0))
        assert times.estimate(B, Depth.STOPPED) == times.estimate(A, Depth.STOPPED)
        assert times.estimate(B, Depth.RELEASED) is None

    def test_other_places_are_not_read(self, database: Database) -> None:
        StartTimes(database).note(Start(Unit("m", "a", "there"), Depth.STOPPED, 4.0))
        times = StartTimes(database)
        times.load(["here", ""])
        assert list(times.estimates()) == []

    def test_a_unit_that_is_deployed_no_more_is_forgotten(self, database: Database, clock: SettableClock) -> None:
        store = UnitStore(database, lease_s=10, clock=clock, limits=StartLimits())
        store.add([(A, Wish.ASLEEP)])
        times = StartTimes(database)
        times.note(Start(A, Depth.STOPPED, 4.0))
        times.note(Start(B, Depth.STOPPED, 5.0))
        store.forget(A)
        times.load(["here"])
        assert [unit for unit, *_ in times.estimates()] == [B]


def test_of_a_models_units_the_slowest_is_told_to_who_scrapes(database: Database) -> None:
    times = StartTimes(database)
    times.note(Start(A, Depth.STOPPED, 8.0, {"imports": 5.0}))
    times.note(Start(B, Depth.STOPPED, 4.0, {"imports": 6.0}))
    registry = CollectorRegistry()
    registry.register(StartTimesCollector(times))
    labels = {"model": "m", "depth": "stopped"}
    assert registry.get_sample_value("pagegate_unit_start_learned_seconds", labels | {"quantile": "0.5"}) == 8.0
    assert registry.get_sample_value("pagegate_unit_start_learned_seconds", labels | {"quantile": "0.9"}) == 12.0
    assert registry.get_sample_value("pagegate_unit_start_part_seconds", labels | {"part": "imports"}) == 6.0
