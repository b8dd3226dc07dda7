"""The figures of a report."""

import pytest

from gateway.replay.report import fair_shares, jain_index, percentile


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.95) == 4.0
    assert percentile([], 0.5) == 0.0


def test_jains_index_is_one_for_equals_and_one_nth_for_a_monopoly() -> None:
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0, 0.0]) == pytest.approx(0.2)


def test_fair_shares_give_small_demands_whole_and_level_the_rest() -> None:
    assert fair_shares({"a": 1.0, "b": 10.0, "c": 100.0}, 21.0) == pytest.approx({"a": 1.0, "b": 10.0, "c": 10.0})
    assert sum(fair_shares({"a": 5.0, "b": 5.0}, 4.0).values()) == pytest.approx(4.0)
