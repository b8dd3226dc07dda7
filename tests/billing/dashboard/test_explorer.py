"""The explorer over both databases: largest groups and the rest, and every step adds up whatever the boundaries."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.dashboard.explorer import TOP_MAX, Measure, cache_hit_permille, cumulative, explore, reach_fault
from billing.rollups import DAY_NS, HOUR_NS
from billing.store import UsageStore
from billing.summaries import EVERYTHING, MINUTE_NS, GroupBy, UsageFilter, UsageTotals
from tenancy.database import Database
from tests.billing.builders import ACCOUNT
from tests.billing.rows import event_row, post_rows, wipe
from tests.examples import examples
from tests.tenancy.conftest import over_both_databases

_rows = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.sampled_from([f"m{number:02}" for number in range(14)]),
            "key_id": st.sampled_from(["k1", "k2"]),
            "outcome": st.sampled_from(["finished", "refused"]),
            "started_at_ns": st.builds(lambda hour, off: hour * HOUR_NS + off, st.integers(1, 70), st.integers(-1, 1)),
            "prompt_tokens": st.integers(1, 50),
            "cost_nano": st.integers(0, 9),
        }
    ),
    max_size=40,
)
_filters = st.sampled_from([EVERYTHING, UsageFilter(key_id="k1"), UsageFilter(outcome="finished", model="m01")])


@over_both_databases
class TestExplore:
    @pytest.mark.load
    @settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        rows=_rows,
        step=st.sampled_from([GroupBy.DAY, GroupBy.HOUR]),
        by=st.sampled_from([GroupBy.MODEL, GroupBy.KEY, GroupBy.OUTCOME, GroupBy.NONE]),
        measure=st.sampled_from(list(Measure)),
        only=_filters,
        bounds=st.tuples(st.integers(0, 40), st.integers(41, 80)),
    )
    def test_bands_steps_and_groups_add_up_to_the_same_total(  # noqa: PLR0917 - one history, every way to look at it
        self,
        database: Database,
        rows: list[dict[str, Any]],
        step: GroupBy,
        by: GroupBy,
        measure: Measure,
        only: UsageFilter,
        bounds: tuple[int, int],
    ) -> None:
        wipe(database)
        post_rows(database, *(event_row(id=f"r{number}", **row) for number, row in enumerate(rows)))
        from_ns, to_ns = (hours * HOUR_NS for hours in bounds)
        found = explore(UsageStore(database), ACCOUNT, from_ns, to_ns, step, by, measure, only)
        total = measure.of(found.totals)
        assert sum(sum(band.values) for band in found.bands) == total
        assert sum(measure.of(band.totals) for band in found.bands) == total
        if by is not GroupBy.NONE:
            assert sum(measure.of(group.totals) for group in found.groups) == total
        mine = [
            row
            for row in rows
            if from_ns <= row["started_at_ns"] < to_ns
            and all(row[name] == want for name in ("model", "key_id", "outcome") if (want := getattr(only, name)))
        ]
        assert found.totals.requests == len(mine)
        assert all(len(band.values) == len(found.steps_ns) for band in found.bands)

    def test_groups_beyond_the_largest_are_one_band_that_says_how_many(self, database: Database) -> None:
        rows = [
            event_row(id=f"r{number}", model=f"m{number:02}", started_at_ns=DAY_NS, cost_nano=number + 1)
            for number in range(12)
        ]
        post_rows(database, *rows)
        found = explore(
            UsageStore(database), ACCOUNT, DAY_NS, 2 * DAY_NS, GroupBy.DAY, GroupBy.MODEL, Measure.COST, EVERYTHING
        )
        assert [band.key for band in found.bands] == [f"m{number:02}" for number in range(11, 3, -1)] + [None]
        assert (found.others, found.bands[-1].totals.cost_nano) == (4, 1 + 2 + 3 + 4)
        assert len(found.bands) == TOP_MAX + 1

    def test_minutes_are_told_and_empty_ones_are_zero(self, database: Database) -> None:
        post_rows(
            database,
            *(event_row(id=f"r{at}", started_at_ns=at * MINUTE_NS + 5) for at in (1, 3)),
        )
        found = explore(
            UsageStore(database), ACCOUNT, 0, 5 * MINUTE_NS, GroupBy.MINUTE, GroupBy.NONE, Measure.REQUESTS, EVERYTHING
        )
        assert found.bands[0].values == (0, 1, 0, 1, 0)


def test_a_reach_that_would_read_too_much_is_refused_in_words() -> None:
    assert reach_fault(0, 7 * DAY_NS, GroupBy.HOUR, GroupBy.KEY, UsageFilter(model="m")) is None
    assert reach_fault(0, 8 * DAY_NS, GroupBy.HOUR, GroupBy.KEY, UsageFilter(model="m")) is not None
    assert reach_fault(0, 31 * DAY_NS, GroupBy.HOUR, GroupBy.KEY, EVERYTHING) is None
    assert reach_fault(0, DAY_NS + 1, GroupBy.MINUTE, GroupBy.NONE, EVERYTHING) is not None


@pytest.mark.parametrize(("prompt", "cached", "permille"), [(0, 0, None), (1_000, 250, 250), (3, 1, 333), (2, 1, 500)])
def test_a_hit_rate_is_of_prompt_tokens(prompt: int, cached: int, permille: int | None) -> None:
    assert cache_hit_permille(UsageTotals(prompt_tokens=prompt, cached_tokens=cached)) == permille


def test_cumulative_values_run_up() -> None:
    assert cumulative((1, 0, 2)) == (1, 1, 3)
    assert cumulative(()) == ()
