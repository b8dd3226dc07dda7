"""`pagegate usage`."""

import csv
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pytest

from billing.price_book import set_price
from tenancy.database import open_database
from tests.api.cli.conftest import Pagegate
from tests.billing.builders import price
from tests.billing.rows import event_row, post_rows

Answer = Callable[..., Any]
_HOUR_NS = 3_600_000_000_000
_NOON_NS = 1_795_867_200_000_000_000  # 2026-11-28T12:00:00Z


@pytest.fixture
def account_id(answer: Answer, home: Path) -> str:
    opened = str(answer("accounts", "open", "acme")["id"])
    database = open_database(f"sqlite:///{home}/pagegate.db")
    with database.write() as connection:
        set_price(connection, price())
    rows = (
        event_row(
            id=f"r{number}",
            account_id=opened,
            started_at_ns=_NOON_NS + number * 6 * _HOUR_NS,
            tags=(None, '{"env":"dev","team":"a"}', '{"team":"a"}', None)[number],
            end_user="ada" if number == 3 else None,
        )
        for number in range(4)
    )
    post_rows(database, *rows)
    database.close()
    return opened


def test_a_period_is_summed_and_grouped_by_day(answer: Answer, account_id: str) -> None:
    summary = answer(
        *("usage", "show", account_id, "--from", "2026-11-28", "--to", "2026-11-30T00:00:00Z", "--group-by", "day"),
    )
    assert summary["totals"]["requests"] == 4
    assert summary["totals"]["cost_usd"] == "0.00404"
    assert [(group["day"], group["requests"]) for group in summary["groups"]] == [("2026-11-28", 2), ("2026-11-29", 2)]


def test_groups_by_tag_and_what_has_none_are_told_beside_totals_that_count_once(
    answer: Answer, pagegate: Pagegate, account_id: str
) -> None:
    days = ("--from", "2026-11-28", "--to", "2026-11-30T00:00:00Z")
    summary = answer("usage", "show", account_id, *days, "--group-by", "tag")
    assert [(group["tag"], group["requests"]) for group in summary["groups"]] == [
        ("", 2),
        ("env=dev", 1),
        ("team=a", 2),
    ]
    assert summary["totals"] == answer("usage", "show", account_id, *days)["totals"]
    assert answer("usage", "show", account_id, *days, "--tag", "team=a")["totals"]["requests"] == 2
    assert answer("usage", "show", account_id, *days, "--end-user", "ada")["totals"]["requests"] == 1
    code, *said = pagegate("usage", "show", account_id, *days, "--tag", "team=a", "--outcome", "finished")
    assert (code, "told apart by model, key, project and day" in " ".join(" ".join(map(str, said)).split())) == (
        1,
        True,
    )


def test_a_period_ends_before_its_last_instant(answer: Answer, account_id: str) -> None:
    period = ("--from", "2026-11-28T12:00:00Z", "--to", "2026-11-29T01:00:00+01:00")
    assert answer("usage", "show", account_id, *period)["totals"]["requests"] == 2


def test_one_request_is_shown_with_its_cost(answer: Answer, account_id: str) -> None:
    record = answer("usage", "request", account_id, "r0")
    assert (record["outcome"], record["cost_nano"], record["cost_usd"]) == ("finished", 1_010_000, "0.00101")
    assert record["started_at"] == "2026-11-28T12:00:00Z"


def test_another_accounts_request_is_unknown(pagegate: Pagegate, answer: Answer, account_id: str) -> None:
    other = answer("accounts", "open", "other")["id"]
    assert pagegate("usage", "request", other, "r0") == pagegate("usage", "request", account_id, "nothing")
    assert pagegate("usage", "request", other, "r0")[0] == 1
    assert answer("usage", "show", other)["totals"]["requests"] == 0


def test_an_unknown_account_is_one_sentence(pagegate: Pagegate, account_id: str) -> None:
    assert pagegate("usage", "show", "0" * 32) == (1, "", "pagegate: There is no such account.\n")


def test_a_time_that_is_none_is_a_usage_error(pagegate: Pagegate, account_id: str) -> None:
    code, out, err = pagegate("usage", "show", account_id, "--from", "last week")
    assert (code, out) == (2, "")
    assert "ISO 8601" in err


def test_tables_show_groups_and_a_total(pagegate: Pagegate, account_id: str) -> None:
    code, out, _ = pagegate("usage", "show", account_id, "--from", "2026-11-01", "--group-by", "model")
    assert code == 0
    assert "@cf/test/model" in out
    assert "Total" in out


def test_an_export_has_every_request_of_the_period_and_its_sum(
    pagegate: Pagegate, answer: Answer, account_id: str
) -> None:
    period = ("--from", "2026-11-28", "--to", "2026-11-29T00:00:00Z")
    code, out, err = pagegate("usage", "export", account_id, *period)
    assert code == 0, err
    rows = list(csv.DictReader(out.splitlines()))
    assert [row["id"] for row in rows] == ["r0", "r1"]
    assert (rows[0]["started_at"], rows[0]["cost_usd"], rows[0]["code"]) == ("2026-11-28T12:00:00Z", "0.00101", "")
    totals = answer("usage", "show", account_id, *period)["totals"]
    assert sum(int(row["cost_nano"]) for row in rows) == totals["cost_nano"]


PERIOD = ("--from", "2026-11-28", "--to", "2026-11-30T00:00:00Z")


def test_every_export_comes_to_the_same_sum(
    pagegate: Pagegate, answer: Answer, account_id: str, tmp_path: Path
) -> None:
    expected = Decimal(answer("usage", "show", account_id, *PERIOD)["totals"]["cost_usd"])
    columns = {"csv": "cost_usd", "focus-csv": "BilledCost", "parquet": "cost_usd", "focus-parquet": "BilledCost"}
    for form, column in columns.items():
        file = tmp_path / form
        code, _, error = pagegate("usage", "export", account_id, *PERIOD, "--format", form, "--output", str(file))
        assert code == 0, error
        if form.endswith("csv"):
            with file.open(newline="") as text:
                total = sum(Decimal(row[column]) for row in csv.DictReader(text))
        else:
            found = duckdb.sql(f"SELECT SUM({column}) FROM read_parquet('{file}')").fetchone()
            assert found is not None
            total = found[0]
        assert total == expected, form


def test_parquet_has_types(pagegate: Pagegate, account_id: str, tmp_path: Path) -> None:
    file = tmp_path / "usage.parquet"
    assert pagegate("usage", "export", account_id, *PERIOD, "--format", "parquet", "--output", str(file))[0] == 0
    kinds = dict(duckdb.sql(f"SELECT column_name, column_type FROM (DESCRIBE FROM read_parquet('{file}'))").fetchall())
    assert (kinds["cost_nano"], kinds["started_at"], kinds["stream"]) == (
        "BIGINT",
        "TIMESTAMP WITH TIME ZONE",
        "BOOLEAN",
    )
    (row,) = duckdb.sql(f"SELECT code, model FROM read_parquet('{file}') LIMIT 1").fetchall()
    assert row == (None, "@cf/test/model")


def test_parquet_needs_a_file(pagegate: Pagegate, account_id: str) -> None:
    code, _, error = pagegate("usage", "export", account_id, *PERIOD, "--format", "parquet")
    assert (code, "--output" in error) == (2, True)


def test_a_cloud_event_is_a_request_under_its_own_id(pagegate: Pagegate, account_id: str) -> None:
    code, out, _ = pagegate("usage", "export", account_id, *PERIOD, "--format", "cloudevents")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["id"] for event in events] == ["r0", "r1", "r2", "r3"]
    assert events[0]["specversion"] == "1.0"
    assert events[0]["source"] == f"/accounts/{account_id}"
    assert events[0]["data"]["gen_ai.usage.output_tokens"] == 100
    assert events[0]["data"]["cost_usd"] == "0.00101"


def test_a_stripe_meter_event_counts_each_token_once(pagegate: Pagegate, account_id: str) -> None:
    _, out, _ = pagegate("usage", "export", account_id, *PERIOD, "--format", "stripe")
    events = [json.loads(line) for line in out.splitlines()]
    assert len({event["identifier"] for event in events}) == 4
    assert {event["payload"]["value"] for event in events} == {"110"}
