"""Budgets through the console: set, told and removed, of what is there."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from api.app import create_app
from api.settings import Settings
from billing.budgets import Budgets
from tenancy import audit_log, projects, provisioning
from tenancy.authenticate import Authenticator
from tenancy.keys import KeyKind
from tenancy.pepper import open_pepper
from tests.api.console.administered import Administered, administered
from tests.fakes import Fakes, fake_services
from tests.tenancy.clock import SettableClock


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Administered]:
    with administered(tmp_path) as found:
        services = replace(
            fake_services(Fakes()),
            settings=Settings.model_validate({"home": tmp_path, "cache_dir": tmp_path}),
            database=found.database,
            authenticator=Authenticator(found.database, open_pepper(tmp_path / "pepper"), ttl_s=1e-9, stale_s=0),
            # It stands still, or a month could end between two looks at its budget.
            budgets=Budgets(found.database, clock=SettableClock(time.time_ns())),
        )
        yield replace(found, app=create_app(services))


async def test_a_budget_is_set_told_and_removed(both: Administered) -> None:
    project = projects.open_project(both.database, both.account_id, "p").id
    body = {"limit": "12.50", "period": "month", "project_id": project, "model": "@cf/x/y", "hard": False}
    added = await both.ask("POST", "/budgets", body)
    assert added.status == 201
    assert {name: added.json[name] for name in body} == body | {"limit": "12.5"}
    assert (added.json["limit_nano"], added.json["spent_nano"]) == (12_500_000_000, 0)
    (entry,) = audit_log.read_audit_log(both.database, both.account_id, 1)
    assert (entry.action, entry.actor_id) == ("budget.add", both.admin.key.id)
    assert (await both.ask("GET", "/budgets")).json["budgets"] == [added.json]
    assert (await both.ask("DELETE", f"/budgets/{added.json['id']}")).status == 204
    assert (await both.ask("GET", "/budgets")).json["budgets"] == []
    assert (await both.ask("DELETE", f"/budgets/{added.json['id']}")).status == 404


async def test_a_tenant_removes_its_own_budgets_and_never_an_operators(both: Administered, tmp_path: Path) -> None:
    tenant = provisioning.issue_key(
        both.database,
        open_pepper(tmp_path / "pepper"),
        both.account_id,
        name="tenant",
        kind=KeyKind.ADMIN,
        clock=time.time_ns,
    ).text
    body = {"limit": "5", "period": "day"}
    theirs = (await both.ask("POST", "/budgets", body, key=both.other.text)).json
    own = (await both.ask("POST", "/budgets", body | {"limit": "9"}, key=tenant)).json
    assert (theirs["set_by"], own["set_by"]) == ("operator", "account")
    refused = await both.ask("DELETE", f"/budgets/{theirs['id']}", key=tenant)
    assert (refused.status, refused.json["code"]) == (403, "scope_missing")
    assert "set by the operator" in refused.json["detail"]
    listed = (await both.ask("GET", "/budgets", key=tenant)).json["budgets"]
    assert {one["set_by"] for one in listed} == {"operator", "account"}
    assert (await both.ask("DELETE", f"/budgets/{own['id']}", key=tenant)).status == 204
    assert (await both.ask("DELETE", f"/budgets/{theirs['id']}", key=both.other.text)).status == 204
    again = (await both.ask("POST", "/budgets", body, key=tenant)).json
    assert (await both.ask("DELETE", f"/budgets/{again['id']}", key=both.other.text)).status == 204


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"limit": "1", "period": "week"}, 400),
        ({"limit": "-1", "period": "day"}, 400),
        ({"limit": 1, "period": "day"}, 400),
        ({"limit": "1e3", "period": "day"}, 400),
        ({"limit": "1", "period": "day", "key_id": "unknown"}, 404),
        ({"limit": "1", "period": "day", "project_id": "unknown"}, 404),
        ({"limit": "99999999", "period": "day"}, 409),
    ],
)
async def test_one_that_can_not_be_is_refused_and_leaves_nothing(
    both: Administered, body: dict[str, object], status: int
) -> None:
    answer = await both.ask("POST", "/budgets", body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert (await both.ask("GET", "/budgets")).json["budgets"] == []
