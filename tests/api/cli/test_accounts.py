"""`pagegate accounts`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.cli.conftest import Pagegate

Answer = Callable[..., Any]


def test_an_account_is_opened_listed_and_shown(answer: Answer) -> None:
    opened = answer("accounts", "open", "acme", "--concurrency", "3", "--credit-limit", "1.50")
    assert opened["name"] == "acme"
    assert (opened["concurrency"], opened["credit_limit_usd"], opened["suspended"]) == (3, "1.5", False)
    assert answer("accounts", "list") == [opened]
    assert answer("accounts", "show", opened["id"]) == opened


def test_the_first_command_makes_a_private_data_folder(answer: Answer, home: Path) -> None:
    shutil.rmtree(home)
    assert answer("accounts", "list") == []
    assert home.stat().st_mode & 0o777 == 0o700


def test_suspending_and_resuming(answer: Answer) -> None:
    account_id = answer("accounts", "open", "acme")["id"]
    assert answer("accounts", "suspend", account_id)["suspended"] is True
    assert answer("accounts", "resume", account_id)["suspended"] is False


def test_a_limit_that_is_not_named_stays(answer: Answer) -> None:
    account_id = answer("accounts", "open", "acme", "--concurrency", "3", "--credit-limit", "1")["id"]
    changed = answer("accounts", "set-limits", account_id, "--concurrency", "none")
    assert (changed["concurrency"], changed["credit_limit_usd"]) == (None, "1")
    changed = answer("accounts", "set-limits", account_id, "--credit-limit", "0")
    assert (changed["concurrency"], changed["credit_limit_usd"]) == (None, "0")


@pytest.mark.parametrize(
    "options",
    [[], ["--concurrency", "0"], ["--concurrency", "-1"], ["--concurrency", "x"], ["--credit-limit", "1e3"]],
)
def test_a_limit_that_can_not_be_is_a_usage_error(pagegate: Pagegate, answer: Answer, options: list[str]) -> None:
    account = answer("accounts", "open", "acme")
    code, out, err = pagegate("accounts", "set-limits", account["id"], *options)
    assert (code, out) == (2, "")
    assert err
    assert answer("accounts", "show", account["id"]) == account


def test_a_taken_name_and_an_unknown_account_are_one_sentence(pagegate: Pagegate, answer: Answer) -> None:
    answer("accounts", "open", "acme")
    assert pagegate("accounts", "open", "acme") == (1, "", "pagegate: An account named 'acme' exists already.\n")
    assert pagegate("accounts", "show", "0" * 32) == (1, "", "pagegate: There is no such account.\n")


def test_a_table_shows_ids_whole(pagegate: Pagegate, answer: Answer) -> None:
    account_id = answer("accounts", "open", "acme")["id"]
    code, out, _ = pagegate("accounts", "list")
    assert code == 0
    assert account_id in out


def test_limits_are_set_replaced_and_removed(answer: Answer, pagegate: Pagegate) -> None:
    account_id = answer("accounts", "open", "acme")["id"]
    key_id = answer("keys", "issue", account_id, "--name", "ci")["id"]
    of_operator = {"set_by": "operator"}
    answer("accounts", "set-limit", account_id, "requests_per_minute", "60")
    answer("accounts", "set-limit", account_id, "requests_per_minute", "30")
    answer("accounts", "set-limit", account_id, "tokens_per_day", "5", "--key", key_id, "--model", "m")
    assert answer("accounts", "limits", account_id) == [
        {"meter": "requests_per_minute", "limit": 30, "project_id": None, "key_id": None, "model": None} | of_operator,
        {"meter": "tokens_per_day", "limit": 5, "project_id": None, "key_id": key_id, "model": "m"} | of_operator,
    ]
    assert pagegate("accounts", "remove-limit", account_id, "requests_per_minute")[0] == 0
    assert len(answer("accounts", "limits", account_id)) == 1
    whose = ("accounts", "remove-limit", account_id, "tokens_per_day", "--key", key_id, "--model", "m", "--set-by")
    assert [pagegate(*whose, setter)[0] for setter in ("account", "operator")] == [1, 0]
    assert pagegate("accounts", "remove-limit", account_id, "requests_per_minute")[0] == 1
    assert pagegate("accounts", "set-limit", account_id, "requests_per_minute", "0")[0] == 2


def test_an_account_changes_its_plan(answer: Answer) -> None:
    opened = answer("accounts", "open", "acme")
    assert opened["plan"] == "paid"
    assert answer("accounts", "set-plan", opened["id"], "free")["plan"] == "free"
    assert answer("accounts", "set-regions", opened["id"], "eu-west", "eu-north")["regions"] == ["eu-north", "eu-west"]
    assert answer("accounts", "set-regions", opened["id"], "any")["regions"] is None
    turns = answer("accounts", "set-turns", opened["id"], "--tier", "1", "--weight-percent", "300")
    assert (turns["tier"], turns["weight_percent"]) == (1, 300)
