"""Percentiles of times to the first token: nearest rank, of the account's own newest answers."""

import pytest

from billing.latency import Latency, percentile
from billing.store import UsageStore
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT
from tests.billing.rows import event_row, post_rows
from tests.tenancy.conftest import over_both_databases


@pytest.mark.parametrize(
    ("values", "percent", "rank"),
    [([], 50, None), ([7], 95, 7), ([1, 2, 3, 4], 50, 2), (list(range(1, 101)), 95, 95), ([1, 2], 95, 2)],
)
def test_a_percentile_is_the_nearest_rank(values: list[int], percent: int, rank: int | None) -> None:
    assert percentile(values, percent) == rank


@over_both_databases
def test_only_answers_of_the_account_and_the_period_count(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [event_row(id=f"r{at}", started_at_ns=at, ttft_ms=at) for at in range(1, 11)]
    silent = event_row(id="silent", started_at_ns=5, ttft_ms=None)
    foreign = event_row(id="foreign", account_id=OTHER_ACCOUNT, started_at_ns=5, ttft_ms=9_999)
    post_rows(database, *rows, silent, foreign)
    store = UsageStore(database)
    assert store.latency(ACCOUNT, 1, 11) == Latency(10, 5, 10)
    assert store.latency(ACCOUNT, 3, 5) == Latency(2, 3, 4)
    assert store.latency(ACCOUNT, 50, 60) == Latency(0, None, None)
    monkeypatch.setattr("billing.latency.SAMPLE_MAX", 2)
    assert store.latency(ACCOUNT, 1, 11) == Latency(2, 9, 10)
