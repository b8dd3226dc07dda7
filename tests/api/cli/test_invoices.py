"""`pagegate invoices`, `pagegate ledger prove` and `pagegate wallet pay`: from usage to a paid invoice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from billing.ledger.periods import month_bounds
from billing.price_book import set_price
from billing.tables import usage_events
from tenancy.database import open_database
from tests.api.cli.conftest import Pagegate
from tests.billing.builders import price
from tests.billing.rows import event_row, post_rows

Answer = Callable[..., Any]


@pytest.fixture
def account_id(answer: Answer, home: Path) -> str:
    """An account that used a little more than a cent and a half in October."""
    account = str(answer("accounts", "open", "acme")["id"])
    database = open_database(f"sqlite:///{home}/pagegate.db")
    with database.write() as connection:
        set_price(connection, price())
    start_ns, _ = month_bounds("2026-10")
    post_rows(
        database, *(event_row(id=f"r{number}", account_id=account, started_at_ns=start_ns) for number in range(15))
    )
    database.close()
    return account


def test_a_month_is_closed_once_shown_and_paid(
    answer: Answer, pagegate: Pagegate, account_id: str, tmp_path: Path
) -> None:
    answer("invoices", "address", account_id, "Acme & Co\\nRoad 2")
    assert answer("invoices", "close", "2026-10") == {"months_closed": 1, "invoices_written": 1, "months_sealed": 1}
    assert answer("invoices", "close", "2026-10") == {"months_closed": 0, "invoices_written": 0, "months_sealed": 0}
    (invoice,) = answer("invoices", "list", account_id)
    assert (invoice["number"], invoice["total_usd"], invoice["due_usd"]) == ("000001", "0.01515", "0.02")
    assert answer("wallet", "show", account_id)["owed_usd"] == "0.02"
    answer("wallet", "pay", account_id, "0.02", "--idempotency-key", "wire 1")
    assert answer("wallet", "show", account_id)["owed_usd"] == "0"
    for form, begins in (("pdf", b"%PDF-"), ("html", b"<!doctype html>"), ("csv", b"invoice,month,")):
        file = tmp_path / f"invoice.{form}"
        assert pagegate("invoices", "show", account_id, "1", "--format", form, "--output", str(file))[0] == 0
        assert file.read_bytes().startswith(begins)
    assert "Acme &amp; Co" in (tmp_path / "invoice.html").read_text()


def test_a_seal_is_proved_until_the_month_is_changed(
    answer: Answer, pagegate: Pagegate, account_id: str, home: Path
) -> None:
    answer("invoices", "close", "2026-10", "--account", account_id)
    assert [row["holds"] for row in answer("ledger", "prove", "2026-10")] == [True]
    database = open_database(f"sqlite:///{home}/pagegate.db")
    with database.write() as connection:
        connection.execute(usage_events.update().where(usage_events.c.id == "r3").values(outcome="cancelled"))
    database.close()
    code, out, _ = pagegate("ledger", "prove", "--json")
    assert code == 1
    assert '"holds":false' in out


@pytest.mark.parametrize("month", ["2026-13", "october", "2999-01"])
def test_a_month_that_is_none_or_has_not_ended_is_said(pagegate: Pagegate, account_id: str, month: str) -> None:
    code, _, error = pagegate("invoices", "close", month)
    assert code == 2
    assert "is not a month" in error or "has not ended" in error


def test_an_unknown_invoice_is_said(pagegate: Pagegate, account_id: str) -> None:
    code, _, error = pagegate("invoices", "show", account_id, "7")
    assert (code, "no such invoice" in error) == (1, True)
