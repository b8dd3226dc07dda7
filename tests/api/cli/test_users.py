"""`pagegate users`, `members`, `audit` and `dashboard`."""

import io
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.cli.conftest import Pagegate

Answer = Callable[..., Any]
_PASSWORD = "a horse, a battery"


def test_a_user_is_added_changed_and_listed(answer: Answer) -> None:
    user = answer("users", "add", "Ann@example.com", "--name", "Ann")
    assert (user["email"], user["operator"], user["has_password"]) == ("ann@example.com", False, False)
    assert answer("users", "set-operator", "ann@example.com")["operator"]
    assert not answer("users", "set-operator", "ann@example.com", "--off")["operator"]
    assert answer("users", "disable", "ann@example.com")["disabled"]
    assert not answer("users", "enable", "ann@example.com")["disabled"]
    assert answer("users", "list") == [user]


def test_a_password_comes_from_standard_input_and_is_in_no_output(
    answer: Answer, pagegate: Pagegate, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer("users", "add", "ann@example.com", "--name", "Ann")
    monkeypatch.setattr("sys.stdin", io.StringIO(_PASSWORD + "\n"))
    code, out, err = pagegate("users", "set-password", "ann@example.com")
    assert (code, _PASSWORD in out + err) == (0, False)
    assert answer("users", "list")[0]["has_password"]


def test_a_weak_password_is_refused(pagegate: Pagegate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    code, _, err = pagegate("users", "set-password", "ann@example.com")
    assert code == 2
    assert "12 to 256 characters" in err


def test_members_come_and_go(answer: Answer, pagegate: Pagegate) -> None:
    account_id = answer("accounts", "open", "acme")["id"]
    answer("users", "add", "ann@example.com", "--name", "Ann")
    assert pagegate("members", "set", account_id, "ann@example.com", "owner")[0] == 0
    assert [(one["email"], one["role"]) for one in answer("members", "list", account_id)] == [
        ("ann@example.com", "owner")
    ]
    code, _, err = pagegate("members", "remove", account_id, "ann@example.com")
    assert code == 1
    assert "at least one owner" in err


def test_an_unknown_user_is_one_sentence(pagegate: Pagegate) -> None:
    code, _, err = pagegate("users", "disable", "nobody@example.com")
    assert (code, err) == (1, "pagegate: There is no such user.\n")


def test_the_log_tells_of_every_command_and_verifies(answer: Answer) -> None:
    account_id = answer("accounts", "open", "acme")["id"]
    answer("accounts", "set-limit", account_id, "requests_per_minute", "5")
    answer("wallet", "top-up", account_id, "1", "--idempotency-key", "k")
    answer("budgets", "add", account_id, "1", "day")
    answer("prices", "set", "m", "--input", "1", "--output", "1")
    actions = [entry["action"] for entry in answer("audit", "list")]
    assert actions == ["price.set", "budget.add", "wallet.top_up", "limit.set", "account.open"]
    assert len(answer("audit", "list", "--account", account_id)) == 4
    verdict = answer("audit", "verify")
    assert (verdict["ok"], verdict["entries"]) == (True, 5)
    head = verdict["head"]
    answer("accounts", "suspend", account_id)
    assert answer("audit", "verify", "--known", f"{head['number']}:{head['hash']}")["ok"]


def test_a_log_that_was_tampered_with_is_exit_code_one(answer: Answer, pagegate: Pagegate, home: Path) -> None:
    answer("accounts", "open", "acme")
    with sqlite3.connect(home / "pagegate.db") as database:
        database.execute("UPDATE audit_log SET action = 'nothing'")
    database.close()
    code, out, _ = pagegate("audit", "verify", "--json")
    assert code == 1
    assert "entry 1 was changed" in out


def test_the_dashboard_command_prints_a_link_for_the_first_operator(answer: Answer, pagegate: Pagegate) -> None:
    answer("accounts", "open", "acme")
    code, out, err = pagegate("dashboard")
    assert code == 0
    assert out.startswith("http://127.0.0.1:8787/dashboard/link/")
    assert "operator@localhost" in err
    assert [user["email"] for user in answer("users", "list")] == ["operator@localhost"]
    assert pagegate("dashboard", "--base-url", "https://gate.example/")[1].startswith(
        "https://gate.example/dashboard/link/"
    )
    assert pagegate("dashboard", "--user", "nobody@example.com")[0] == 1
