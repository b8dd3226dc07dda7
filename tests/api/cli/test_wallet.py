"""`pagegate wallet`, `pagegate budgets` and `pagegate ledger`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from billing.tables import ledger_accounts
from tenancy.database import open_database
from tests.api.cli.conftest import Pagegate
from tests.billing.rows import event_row, post_rows

Answer = Callable[..., Any]


@pytest.fixture
def account_id(answer: Answer) -> str:
    return str(answer("accounts", "open", "acme")["id"])


def _use(home: Path, account_id: str) -> None:
    database = open_database(f"sqlite:///{home}/pagegate.db")
    post_rows(database, event_row(account_id=account_id))
    database.close()


class TestWallet:
    def test_a_top_up_is_shown_and_booked_once(self, answer: Answer, account_id: str) -> None:
        for replayed in (False, True):
            booked = answer("wallet", "top-up", account_id, "12.5", "--idempotency-key", "wire 7", "--memo", "a wire")
            assert booked == {"source": f"top-up:{account_id}:wire 7", "replayed": replayed}
        shown = answer("wallet", "show", account_id)
        assert shown == {
            "account_id": account_id,
            "mode": "postpaid",
            "hold_mode": "refuse",
            "wallet_usd": "12.5",
            "owed_usd": "0",
            "grants": [],
        }
        (line,) = answer("wallet", "statement", account_id)
        assert (line["memo"], line["entries"]) == ("a wire", ["cash -12.5", f"wallet:{account_id} 12.5"])

    def test_a_grant_is_shown_with_what_is_left(self, answer: Answer, account_id: str) -> None:
        answer(
            *("wallet", "grant", account_id, "5", "--idempotency-key", "hello"),
            *("--expires", "2099-01-01", "--priority", "3"),
        )
        (grant,) = answer("wallet", "show", account_id)["grants"]
        assert (grant["amount_usd"], grant["left_usd"], grant["priority"]) == ("5", "5", 3)
        assert grant["expires_at"] == "2099-01-01T00:00:00Z"

    def test_usage_is_refunded_to_where_it_came_from(self, answer: Answer, account_id: str, home: Path) -> None:
        assert answer("wallet", "mode", account_id, "prepaid")["mode"] == "prepaid"
        answer("wallet", "top-up", account_id, "1", "--idempotency-key", "k")
        _use(home, account_id)
        assert answer("wallet", "show", account_id)["wallet_usd"] == "0.99899"
        answer("wallet", "reverse", account_id, "usage:request-1")
        assert answer("wallet", "show", account_id)["wallet_usd"] == "1"

    def test_an_account_may_rather_have_less_than_be_refused(self, answer: Answer, account_id: str) -> None:
        assert answer("wallet", "hold-mode", account_id, "clamp")["hold_mode"] == "clamp"
        assert answer("wallet", "show", account_id)["hold_mode"] == "clamp"

    def test_it_is_readable_without_json_too(self, pagegate: Pagegate, answer: Answer, account_id: str) -> None:
        answer("wallet", "grant", account_id, "5", "--idempotency-key", "hello")
        code, out, _ = pagegate("wallet", "show", account_id)
        assert code == 0
        assert "postpaid" in out
        assert "Grants" in out

    @pytest.mark.parametrize(
        ("command", "code", "says"),
        [
            (("top-up", "{account}", "1e3", "--idempotency-key", "k"), 2, "not an amount"),
            (("top-up", "{account}", "0", "--idempotency-key", "k"), 1, "above 0"),
            (("top-up", "{account}", "1"), 2, "--idempotency-key"),
            (("top-up", "f" * 32, "1", "--idempotency-key", "k"), 1, "no such account"),
            (("reverse", "{account}", "usage:none"), 1, "no such transaction"),
            (("grant", "{account}", "1", "--idempotency-key", "k", "--expires", "2001-01-01"), 1, "passed already"),
        ],
    )
    def test_what_can_not_be_is_said_in_a_sentence(
        self, pagegate: Pagegate, account_id: str, command: tuple[str, ...], code: int, says: str
    ) -> None:
        got, _, err = pagegate("wallet", *(word.format(account=account_id) for word in command))
        assert (got, says in " ".join(err.split())) == (code, True), err


class TestBudgets:
    def test_one_is_set_listed_and_removed(self, answer: Answer, account_id: str) -> None:
        budget = answer("budgets", "add", account_id, "20", "month", "--model", "@cf/test/model")
        assert (budget["limit_usd"], budget["spent_usd"], budget["hard"], budget["key_id"]) == ("20", "0", True, None)
        assert [one["id"] for one in answer("budgets", "list", account_id)] == [budget["id"]]
        answer("budgets", "remove", account_id, budget["id"])
        assert answer("budgets", "list", account_id) == []

    def test_a_total_shows_what_was_spent_already(self, answer: Answer, account_id: str, home: Path) -> None:
        _use(home, account_id)
        budget = answer("budgets", "add", account_id, "1", "total", "--soft")
        assert (budget["spent_usd"], budget["hard"], budget["from"], budget["to"]) == ("0.00101", False, None, None)
        (listed,) = answer("budgets", "list", account_id, "--at", "1970-01-01")
        assert listed["spent_usd"] == "0.00101"

    def test_another_accounts_key_is_refused(self, pagegate: Pagegate, account_id: str) -> None:
        code, _, err = pagegate("budgets", "add", account_id, "1", "day", "--key-id", "0" * 32)
        assert (code, "no such key" in err) == (2, True)


class TestLedger:
    def test_a_sound_one_is_ok(self, answer: Answer, pagegate: Pagegate, account_id: str, home: Path) -> None:
        answer("prices", "set", "@cf/test/model", "--input", "1", "--cached-input", "0.1", "--output", "10")
        answer("wallet", "top-up", account_id, "1", "--idempotency-key", "k")
        assert answer("ledger", "check") == {"ok": True, "violations": []}

    def test_a_contradiction_is_told_and_ends_in_code_1(
        self, answer: Answer, pagegate: Pagegate, account_id: str, home: Path
    ) -> None:
        answer("wallet", "top-up", account_id, "1", "--idempotency-key", "k")
        database = open_database(f"sqlite:///{home}/pagegate.db")
        with database.write() as connection:
            connection.execute(ledger_accounts.update().values(posted_nano=5))
        database.close()
        code, out, _ = pagegate("ledger", "check")
        assert code == 1
        assert "ledger account cash: says 5 nano-USD" in " ".join(out.split())
