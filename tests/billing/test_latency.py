"""Times to the first token: percentiles from buckets that add up over any period, exact to the bucket."""

from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing.audit import violations
from billing.latency import BOUNDS_MS, Latency, bucket_of, latency_of, percentile
from billing.price_book import set_price
from billing.rollups import DAY_NS, HOUR_NS
from billing.store import UsageStore
from billing.tables import usage_events, usage_first_tokens
from tenancy.database import Database, begin_write, open_database
from tenancy.migrations import SCRIPT_LOCATION, upgrade_schema
from tests.billing.builders import ACCOUNT, MODEL, OTHER_ACCOUNT, price
from tests.billing.rows import event_row, post_rows, wipe
from tests.examples import examples
from tests.tenancy.conftest import over_both_databases

SPAN_NS = 2 * DAY_NS
answers = st.tuples(
    st.integers(0, SPAN_NS - 1),
    st.none() | st.integers(0, 200_000) | st.sampled_from(BOUNDS_MS),
    st.sampled_from([MODEL, "@cf/test/other"]),
)


@pytest.mark.parametrize(
    ("times", "percent", "ends"),
    [([], 50, None), ([7], 95, 10), ([1, 8, 15, 25], 50, 10), (range(1, 101), 95, 100), ([500_000], 50, 120_000)],
)
def test_a_percentile_is_the_end_of_the_bucket_of_the_nearest_rank(
    times: list[int], percent: int, ends: int | None
) -> None:
    counts: dict[int, int] = {}
    for ttft_ms in times:
        counts[bucket_of(ttft_ms)] = counts.get(bucket_of(ttft_ms), 0) + 1
    assert percentile(counts, percent) == ends


@given(st.integers(0, 300_000))
def test_a_bucket_holds_what_it_ends_at_and_nothing_of_the_one_before(ttft_ms: int) -> None:
    bucket = bucket_of(ttft_ms)
    assert bucket == len(BOUNDS_MS) or ttft_ms <= BOUNDS_MS[bucket]
    assert bucket == 0 or ttft_ms > BOUNDS_MS[bucket - 1]


@over_both_databases
@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(answers, max_size=25), st.tuples(st.integers(0, SPAN_NS), st.integers(0, SPAN_NS)))
def test_any_period_has_the_counts_of_its_answers(
    database: Database, listed: list[tuple[int, int | None, str]], period: tuple[int, int]
) -> None:
    wipe(database)
    rows = [
        event_row(id=f"r{number}", started_at_ns=at, ttft_ms=ttft_ms, model=model)
        for number, (at, ttft_ms, model) in enumerate(listed)
    ]
    post_rows(database, *rows, event_row(id="foreign", account_id=OTHER_ACCOUNT, ttft_ms=9))
    post_rows(database, *rows)
    from_ns, to_ns = sorted(period)
    for model in (None, MODEL):
        found = latency_of(database, ACCOUNT, from_ns, to_ns, model)
        expected: dict[int | None, int] = {}
        for at, ttft_ms, of_model in listed:
            if from_ns <= at < to_ns and ttft_ms is not None and model in {None, of_model}:
                bound = next((bound for bound in BOUNDS_MS if ttft_ms <= bound), None)
                expected[bound] = expected.get(bound, 0) + 1
        assert dict(found.buckets) == expected
        assert found.answers == sum(expected.values())
    with database.read() as connection:
        priced = connection.exec_driver_sql("SELECT count(*) FROM prices").scalar()
    if not priced:
        with database.write() as connection:
            set_price(connection, price())
    assert violations(database) == []


@over_both_databases
def test_counts_that_are_not_those_of_the_answers_are_found(database: Database) -> None:
    with database.write() as connection:
        set_price(connection, price())
    post_rows(database, event_row())
    with database.write() as connection:
        connection.execute(usage_first_tokens.update().where(usage_first_tokens.c.grain == "hour").values(requests=2))
    assert violations(database) == [
        f"the hour that begins at 0: account {ACCOUNT}'s times to the first token are not those of its requests"
    ]


def test_answers_of_before_are_put_into_the_buckets(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/old.db")
    config = Config()
    config.set_main_option("script_location", str(SCRIPT_LOCATION))
    config.set_main_option("path_separator", "os")
    with begin_write(database.engine) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0014")
        newer = {"kv_page_ms", "deployment", "precisions", "region"}
        rows = [
            event_row(id=f"r{number}", started_at_ns=number * HOUR_NS, ttft_ms=ttft_ms)
            for number, ttft_ms in enumerate((5, 6, None, 300_000))
        ]
        for row in rows:
            connection.execute(usage_events.insert().inline().values({name: row[name] for name in row.keys() - newer}))
    upgrade_schema(database.engine)
    expected = Latency(3, 10, 120_000, ((5, 1), (10, 1), (None, 1)))
    assert UsageStore(database).latency(ACCOUNT, 0, DAY_NS) == expected
    assert UsageStore(database).latency(ACCOUNT, 1, DAY_NS + 1).answers == 2
    database.close()
