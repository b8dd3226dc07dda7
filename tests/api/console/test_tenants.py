"""What operators' keys set in every account, and tenants' admin keys in their own and no further."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tenancy import audit_log, projects, provisioning
from tenancy.claims import Meter
from tenancy.keys import USUAL_SCOPES, KeyKind
from tenancy.model_switches import disabled_model_ids
from tenancy.pepper import open_pepper
from tests.api.console.administered import Administered, administered
from tests.api.exchange import Exchange, call


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Administered]:
    """Both accounts have a key with every scope: an operator's."""
    with administered(tmp_path) as both:
        yield both


@pytest.fixture
def tenant(both: Administered, tmp_path: Path) -> str:
    """An admin key of the first account, as keys usually are."""
    pepper = open_pepper(tmp_path / "pepper")
    return provisioning.issue_key(
        both.database,
        pepper,
        both.account_id,
        name="tenant",
        kind=KeyKind.ADMIN,
        scopes=USUAL_SCOPES[KeyKind.ADMIN],
        clock=time.time_ns,
    ).text


def _rules(both: Administered) -> list[tuple[str, int, str | None, str | None]]:
    found = provisioning.list_quotas(both.database, both.account_id)
    return [(rule.meter.value, rule.limit, rule.project_id, rule.model) for rule in found]


def _said(answer: Exchange) -> tuple[int, str]:
    return answer.status, answer.json["code"]


def _newest(both: Administered) -> tuple[str, str, str | None]:
    (entry,) = audit_log.read_audit_log(both.database, None, 1)
    return entry.actor_id, entry.action, entry.account_id


async def test_an_operator_limits_another_account_and_takes_it_back(both: Administered) -> None:
    rule = {"meter": "requests_per_minute", "limit": 10}
    answer = await both.ask("PUT", "/limits", rule, key=both.other.text)
    told = rule | {"project_id": None, "key_id": None, "model": None, "set_by": "operator"}
    assert (answer.status, answer.json) == (200, told)
    assert _newest(both) == (both.other.key.id, "limit.set", both.account_id)
    await both.ask("PUT", "/limits", rule | {"limit": 11}, key=both.other.text)
    assert _rules(both) == [("requests_per_minute", 11, None, None)]
    assert (await both.ask("DELETE", "/limits?meter=requests_per_minute", key=both.other.text)).status == 204
    assert _newest(both) == (both.other.key.id, "limit.remove", both.account_id)
    assert _rules(both) == []
    again = await both.ask("DELETE", "/limits?meter=requests_per_minute", key=both.other.text)
    assert again.status == 404


async def test_a_tenant_limits_its_projects_and_keys_and_never_the_whole_account(
    both: Administered, tenant: str
) -> None:
    project = projects.open_project(both.database, both.account_id, "p").id
    provisioning.set_quota(both.database, both.account_id, Meter.REQUESTS_PER_DAY, 5)
    rule: dict[str, Any] = {"meter": "tokens_per_day", "limit": 7, "project_id": project, "model": "@cf/x/y"}
    assert (await both.ask("PUT", "/limits", rule, key=tenant)).status == 200
    of_key = {"meter": "requests_per_day", "limit": 7, "key_id": both.admin.key.id}
    assert (await both.ask("PUT", "/limits", of_key, key=tenant)).status == 200
    for whole in ({"meter": "requests_per_day", "limit": 50}, {"meter": "requests_per_day", "limit": 5, "model": "m"}):
        assert _said(await both.ask("PUT", "/limits", whole, key=tenant)) == (403, "scope_missing")
    removed = await both.ask("DELETE", "/limits?meter=requests_per_day", key=tenant)
    assert _said(removed) == (403, "scope_missing")
    assert ("requests_per_day", 5, None, None) in _rules(both)
    tail = f"/limits?meter=tokens_per_day&project_id={project}&model=@cf/x/y"
    assert (await both.ask("DELETE", tail, key=tenant)).status == 204


async def test_a_tenant_neither_lifts_nor_removes_an_operators_rule_on_its_project_or_key(
    both: Administered, tenant: str
) -> None:
    project = projects.open_project(both.database, both.account_id, "p").id
    bounds: list[dict[str, str]] = [{"project_id": project}, {"key_id": both.admin.key.id}]
    for bound in bounds:
        rule: dict[str, Any] = {"meter": "requests_per_minute", "limit": 5} | bound
        ((name, id_),) = bound.items()
        tail = f"/limits?meter=requests_per_minute&{name}={id_}"
        assert (await both.ask("PUT", "/limits", rule, key=both.other.text)).json["set_by"] == "operator"
        refused = await both.ask("DELETE", tail, key=tenant)
        assert _said(refused) == (403, "scope_missing")
        assert "set by the operator" in refused.json["detail"]
        # Its own stands beside it; taking its own away leaves the operator's.
        own = await both.ask("PUT", "/limits", rule | {"limit": 5_000}, key=tenant)
        assert (own.status, own.json["set_by"]) == (200, "account")
        kept = provisioning.list_quotas(both.database, both.account_id)
        assert [(one.limit, one.set_by.value) for one in kept] == [(5_000, "account"), (5, "operator")]
        assert (await both.ask("DELETE", tail, key=tenant)).status == 204
        for of in ("", "&set_by=operator"):
            assert _said(await both.ask("DELETE", tail + of, key=tenant)) == (403, "scope_missing")
        assert _said(await both.ask("DELETE", f"{tail}&set_by=account", key=tenant)) == (404, "limit_not_found")
        assert (await both.ask("DELETE", tail, key=both.other.text)).status == 204
        assert _rules(both) == []
        # An operator removes what the account set as well.
        await both.ask("PUT", "/limits", rule, key=tenant)
        assert (await both.ask("DELETE", tail, key=both.other.text)).status == 204


@pytest.mark.parametrize(
    "body",
    [
        {"meter": "requests_per_minute", "limit": 0},
        {"meter": "requests_per_minute", "limit": "10"},
        {"meter": "requests_per_hour", "limit": 10},
        {"limit": 10},
        {"meter": "requests_per_minute", "limit": 10, "key_id": "k", "project_id": "p"},
        {"meter": "requests_per_minute", "limit": 10, "more": 1},
    ],
)
async def test_a_rule_that_can_not_be_is_refused(both: Administered, body: object) -> None:
    answer = await both.ask("PUT", "/limits", body)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/problem+json"


async def test_another_accounts_limits_budgets_and_settings_do_not_exist_for_a_tenant(
    both: Administered, tenant: str
) -> None:
    for account_id in (both.other_id, "0" * 32):
        for method, tail, body in (
            ("GET", "", b""),
            ("PATCH", "", {"suspended": True}),
            ("PUT", "/limits", {"meter": "requests_per_minute", "limit": 10}),
            ("DELETE", "/limits?meter=requests_per_minute", b""),
            ("GET", "/budgets", b""),
            ("POST", "/budgets", {"limit": "1", "period": "day"}),
            ("DELETE", "/budgets/x", b""),
        ):
            answer = await both.ask(method, tail, body, key=tenant, account_id=account_id)
            assert _said(answer) == (404, "account_not_found"), (method, tail)
    # For an operator's key an unknown account is one as well.
    for method, tail, body in (
        ("GET", "", b""),
        ("PATCH", "", {"plan": "free"}),
        ("PUT", "/limits", {"meter": "requests_per_minute", "limit": 10}),
        ("GET", "/budgets", b""),
        ("POST", "/budgets", {"limit": "1", "period": "day"}),
    ):
        answer = await both.ask(method, tail, body, account_id="0" * 32)
        assert _said(answer) == (404, "account_not_found"), (method, tail)


async def test_an_account_is_opened_changed_and_suspended_by_an_operator_alone(both: Administered, tenant: str) -> None:
    async def ask(method: str, path: str, body: object = b"", key: str = both.admin.text) -> Exchange:
        return await call(both.app, method, f"/console/v1/accounts{path}", body=body, key=key)

    opened = await ask("POST", "", {"name": "new", "concurrency": 3, "credit_limit": "12.50"})
    assert opened.status == 201
    assert (opened.json["concurrency"], opened.json["credit_limit_nano"]) == (3, 12_500_000_000)
    assert _said(await ask("POST", "", {"name": "new"})) == (409, "name_taken")
    one = f"/{opened.json['id']}"
    change = {"suspended": True, "plan": "free", "credit_limit": None, "tier": 1, "regions": ["eu"]}
    changed = await ask("PATCH", one, change)
    assert changed.status == 200
    assert {name: changed.json[name] for name in (*change, "concurrency")} == change | {"concurrency": 3}
    assert (await ask("GET", one)).json == changed.json
    assert changed.json in (await ask("GET", "")).json["accounts"]
    actions = [entry.action for entry in audit_log.read_audit_log(both.database, opened.json["id"])]
    assert [action.partition(".")[2] for action in actions] == [
        "set_turns", "set_regions", "set_limits", "set_plan", "suspend", "open",
    ]  # fmt: skip
    assert (await ask("PATCH", one, {"concurrency": 0})).status == 400
    assert (await ask("PATCH", one, {"regions": ["no such name!"]})).status == 400
    assert (await ask("PATCH", one, {"regions": None})).json["regions"] is None
    assert (await ask("PATCH", one, {"credit_limit": "9" * 30})).status == 400
    # A tenant sees its own and changes nothing.
    own = f"/{both.account_id}"
    assert (await ask("GET", own, key=tenant)).json["name"] == "acme"
    for refused in (
        await ask("PATCH", own, {"suspended": False}, key=tenant),
        await ask("GET", "", key=tenant),
        await ask("POST", "", {"name": "mine"}, key=tenant),
    ):
        assert _said(refused) == (403, "scope_missing")


async def test_a_model_is_switched_off_and_on_by_an_operator_alone(both: Administered, tenant: str) -> None:
    path, off = "/console/v1/model_switches", {"model": "@cf/x/y", "disabled": True}
    assert (await call(both.app, "POST", path, body=off, key=both.admin.text)).json == off
    assert disabled_model_ids(both.database) == {"@cf/x/y"}
    assert (await call(both.app, "GET", path, key=both.admin.text)).json == {"disabled": ["@cf/x/y"]}
    assert _newest(both) == (both.admin.key.id, "model.disable", None)
    assert _said(await call(both.app, "POST", path, body=off, key=tenant)) == (403, "scope_missing")
    assert _said(await call(both.app, "GET", path, key=tenant)) == (403, "scope_missing")
    await call(both.app, "POST", path, body=off | {"disabled": False}, key=both.admin.text)
    assert disabled_model_ids(both.database) == frozenset()


async def test_an_operators_scope_is_never_a_usual_one(both: Administered, tenant: str) -> None:
    issued = await both.ask("POST", "/keys", {"name": "k", "kind": "admin"}, key=tenant)
    assert not [scope for scope in issued.json["scopes"] if scope.startswith("operator:")]
    asked = {"name": "k2", "kind": "admin", "scopes": ["operator:write"]}
    assert (await both.ask("POST", "/keys", asked, key=tenant)).status in {400, 403}
