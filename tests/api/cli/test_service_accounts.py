"""`pagegate service-accounts`, and keys that are issued for one."""

from collections.abc import Callable
from typing import Any

from tests.api.cli.conftest import Pagegate

Answer = Callable[..., Any]


def test_one_is_added_bounded_disabled_and_enabled(answer: Answer, pagegate: Pagegate) -> None:
    account_id = str(answer("accounts", "open", "acme")["id"])
    owner_id = str(answer("service-accounts", "add", account_id, "deploy", "developer")["id"])
    key = answer("keys", "issue", account_id, "--name", "k", "--service-account", owner_id)
    assert key["service_account_id"] == owner_id
    assert answer("service-accounts", "set-role", account_id, owner_id, "viewer")["role"] == "viewer"
    assert answer("service-accounts", "disable", account_id, owner_id)["disabled"] is True
    assert answer("service-accounts", "enable", account_id, owner_id)["disabled"] is False
    assert [one["name"] for one in answer("service-accounts", "list", account_id)] == ["deploy"]
    assert pagegate("service-accounts", "add", account_id, "chief", "owner")[0] != 0
