"""`pagegate keys`."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.cli.conftest import Pagegate

Answer = Callable[..., Any]


@pytest.fixture
def account_id(answer: Answer) -> str:
    return str(answer("accounts", "open", "acme")["id"])


def test_a_key_is_shown_once(answer: Answer, pagegate: Pagegate, account_id: str) -> None:
    issued = answer("keys", "issue", account_id, "--name", "ci")
    text = issued.pop("key")
    assert re.fullmatch(r"pgi_live_[0-9A-Za-z]{46}", text)
    assert issued["scopes"] == ["ai:read", "ai:run", "usage:read"]
    assert answer("keys", "list", account_id) == [issued]
    assert text not in pagegate("keys", "list", account_id)[1]


def test_a_key_can_have_fewer_scopes_and_an_end(answer: Answer, account_id: str) -> None:
    issued = answer(
        *("keys", "issue", account_id, "--name", "ops", "--kind", "admin"),
        *("--scope", "operator:read", "--scope", "ai:read", "--expires", "2099-01-01"),
    )
    assert issued["key"].startswith("pga_live_")
    assert issued["scopes"] == ["ai:read", "operator:read"]
    assert issued["expires_at"] == "2099-01-01T00:00:00Z"


def test_a_key_is_disabled_enabled_and_revoked(answer: Answer, account_id: str) -> None:
    key_id = answer("keys", "issue", account_id, "--name", "ci")["id"]
    states = [
        answer("keys", command, account_id, key_id)["state"] for command in ("disable", "enable", "revoke", "enable")
    ]
    assert states == ["disabled", "enabled", "revoked", "revoked"]


@pytest.mark.parametrize(
    "options",
    [
        ["--name", "x", "--scope", "account:admin"],
        ["--name", "x", "--scope", "nonsense"],
        ["--name", "x", "--kind", "root"],
        ["--name", ""],
        ["--name", "x", "--expires", "yesterday"],
        ["--name", "x", "--expires", "2001-01-01"],
        [],
    ],
)
def test_a_key_that_can_not_be_is_a_usage_error(
    pagegate: Pagegate, answer: Answer, account_id: str, options: list[str]
) -> None:
    code, out, err = pagegate("keys", "issue", account_id, *options)
    assert (code, out) == (2, "")
    assert err
    assert answer("keys", "list", account_id) == []


def test_another_accounts_key_is_unknown(pagegate: Pagegate, answer: Answer, account_id: str) -> None:
    other = answer("accounts", "open", "other")["id"]
    key_id = answer("keys", "issue", account_id, "--name", "ci")["id"]
    said = pagegate("keys", "revoke", other, key_id)
    assert said == pagegate("keys", "revoke", other, "0" * 32)
    assert said == (1, "", "pagegate: There is no such key in this account.\n")
    assert answer("keys", "list", account_id)[0]["state"] == "enabled"


def test_a_rotated_key_ends_after_its_grace_and_its_successor_is_shown_once(
    answer: Answer, pagegate: Pagegate, account_id: str
) -> None:
    old = answer("keys", "issue", account_id, "--name", "ci", "--model", "@cf/a/b", "--network", "192.0.2.0/24")
    new = answer("keys", "rotate", account_id, old["id"], "--grace-s", "60")
    text = new.pop("key")
    assert text not in pagegate("keys", "list", account_id)[1]
    assert (new["lineage_id"], new["models"], new["networks"]) == (old["id"], ["@cf/a/b"], ["192.0.2.0/24"])
    ends = {key["id"]: key["expires_at"] for key in answer("keys", "list", account_id)}
    assert ends[new["id"]] is None
    assert ends[old["id"]] is not None


@pytest.mark.parametrize("options", [["--network", "192.0.2.1/24"], ["--network", "here"], ["--model", "a b"]])
def test_a_bound_that_can_not_be_is_a_usage_error(pagegate: Pagegate, account_id: str, options: list[str]) -> None:
    code, _, err = pagegate("keys", "issue", account_id, "--name", "x", *options)
    assert code == 2, err
