"""`pagegate projects`, and what other commands make of a project."""

from collections.abc import Callable
from typing import Any

from tests.api.cli.conftest import Pagegate

Answer = Callable[..., Any]


def test_a_project_has_keys_limits_budgets_and_usage_of_its_own(answer: Answer, pagegate: Pagegate) -> None:
    account_id = str(answer("accounts", "open", "acme")["id"])
    project_id = str(answer("projects", "open", account_id, "search")["id"])
    assert answer("keys", "issue", account_id, "--name", "k", "--project", project_id)["project_id"] == project_id
    assert answer("keys", "issue", account_id, "--name", "k")["project_id"] == account_id
    limit = answer("accounts", "set-limit", account_id, "requests_per_day", "5", "--project", project_id)
    assert answer("accounts", "limits", account_id) == [limit]
    assert limit["project_id"] == project_id
    budget = answer("budgets", "add", account_id, "5", "month", "--project", project_id)
    assert (budget["project_id"], budget["spent_usd"]) == (project_id, "0")
    totals = answer("usage", "show", account_id, "--project", project_id, "--group-by", "project")["totals"]
    assert totals["requests"] == 0
    code, _, said = pagegate("budgets", "add", account_id, "5", "month", "--project", "f" * 32)
    assert (code, "no such project" in said) == (1, True)
    code, _, _ = pagegate("accounts", "remove-limit", account_id, "requests_per_day", "--project", project_id)
    assert (code, answer("accounts", "limits", account_id)) == (0, [])


def test_projects_and_accounts_are_bound_to_models(answer: Answer, pagegate: Pagegate) -> None:
    account_id = str(answer("accounts", "open", "acme")["id"])
    project = answer("projects", "open", account_id, "search", "--model", "m0", "--model", "m1")
    assert project["models"] == ["m0", "m1"]
    assert answer("projects", "set-models", account_id, project["id"], "m1")["models"] == ["m1"]
    assert answer("projects", "set-models", account_id, project["id"], "any")["models"] is None
    assert answer("projects", "set-models", account_id, account_id, "m0")["name"] == "default"
    assert [one["models"] for one in answer("projects", "list", account_id)] == [["m0"], None]
    assert answer("accounts", "set-models", account_id, "m0", "m2")["models"] == ["m0", "m2"]
    assert answer("accounts", "set-models", account_id, "any")["models"] is None
    code, _, said = pagegate("projects", "set-models", account_id, project["id"], "two words")
    assert (code, "without spaces" in said) == (2, True)


def test_a_project_is_renamed_archived_and_restored(answer: Answer, pagegate: Pagegate) -> None:
    account_id = str(answer("accounts", "open", "acme")["id"])
    project_id = str(answer("projects", "open", account_id, "search")["id"])
    assert answer("projects", "rename", account_id, project_id, "find")["name"] == "find"
    assert answer("projects", "archive", account_id, project_id)["archived_at"] is not None
    assert pagegate("keys", "issue", account_id, "--name", "k", "--project", project_id)[0] != 0
    assert answer("projects", "restore", account_id, project_id)["archived_at"] is None
    assert [one["name"] for one in answer("projects", "list", account_id)] == ["default", "find"]
