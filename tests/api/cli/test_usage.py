"""`pagegate usage`."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenancy.database import open_database
from tests.api.cli.conftest import Pagegate
from tests.billing.rows import event_row, post_rows

Answer = Callable[..., Any]
_HOUR_NS = 3_600_000_000_000
_NOON_NS = 1_795_867_200_000_000_000  # 2026-11-28T12:00:00Z


@pytest.fixture
def account_id(answer: Answer, home: Path) -> str:
    opened = str(answer("accounts", "open", "acme")["id"])
    database = open_database(f"sqlite:///{home}/pagegate.db")
    rows = (
        event_row(id=f"r{number}", account_id=opened, started_at_ns=_NOON_NS + number * 6 * _HOUR_NS)
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
