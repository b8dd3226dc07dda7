"""Two tenants on a running service: whatever is another's is answered exactly as what does not exist, on every route.

The routes and their parameters are those of the API's own document, so a new one is walked as well, and one whose ids
this file can't make fails. Compared are status, body and headers, but for the ids themselves and the request's own.
"""

import json
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from billing.invoices.close import MonthClose
from billing.ledger.periods import month_before, month_bounds, month_of
from tenancy import people, projects, provisioning, service_accounts
from tenancy.audit_log import COMMAND_LINE
from tenancy.keys import ALLOWED_SCOPES, KeyKind
from tenancy.pepper import open_pepper
from tenancy.principal import OPERATOR_SCOPES
from tenancy.roles import Role
from tests.billing.rows import event_row, post_rows
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually_async
from tests.e2e.service import Answer, Service, running_service
from tests.stores import PostgresServer
from tests.tenancy.test_walls import walled_database

_UNIQUE = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_OF_THE_REQUEST = {"date", "x-request-id", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"}
# Names of what is no tenant's.
_OF_NOBODY = {"model", "replica_id"}
_BODIES: dict[tuple[str, str], Any] = {
    ("PATCH", "key_id"): {"disabled": True},
    ("POST", "key_id"): {},
    ("PATCH", "project_id"): {"name": "mine now"},
    ("PATCH", "service_account_id"): {"disabled": True},
    ("PATCH", "user_id"): {"role": "viewer"},
}


@dataclass(frozen=True)
class Tenant:
    """ids: of one of each thing that it has, by the name of the parameter."""

    account_id: str
    api_key: str
    admin_key: str
    ids: dict[str, str]

    def key_for(self, path: str) -> str:
        return self.admin_key if path.startswith("/console") else self.api_key


async def _tenant(service: Service, name: str) -> Tenant:
    """An account with one of everything."""
    database, now_ns = service.services.database, time.time_ns()
    pepper = open_pepper(service.services.settings.pepper_path)
    account = provisioning.open_account(database, name, clock=time.time_ns)
    issued = {
        kind: provisioning.issue_key(
            database,
            pepper,
            account.id,
            name=name,
            kind=kind,
            # An operator's scopes would open what is no tenant's.
            scopes=ALLOWED_SCOPES[kind] - OPERATOR_SCOPES,
            clock=time.time_ns,
        )
        for kind in KeyKind
    }
    tenant = Tenant(account.id, issued[KeyKind.INFERENCE].text, issued[KeyKind.ADMIN].text, {})
    last_month = month_before(month_of(now_ns))
    request_id = f"01890000-0000-7000-8000-{secrets.token_hex(6)}"
    started_at_ns = month_bounds(last_month)[0]
    row = event_row(id=request_id, account_id=account.id, started_at_ns=started_at_ns, model=service.model)
    post_rows(database, row)
    MonthClose(database, seller="S", clock=time.time_ns).close(last_month, account.id)
    user = people.add_user(database, email=f"{name}@example.com", name=name, by=COMMAND_LINE, clock=time.time_ns)
    people.set_member(database, account.id, user.id, Role.DEVELOPER, by=COMMAND_LINE, clock=time.time_ns)
    console = f"/console/v1/accounts/{account.id}"
    invoices = (await service.send("GET", f"{console}/invoices", key=tenant.admin_key)).json()["invoices"]
    webhook = await service.send("POST", f"{console}/webhooks", {"url": "https://example.com"}, key=tenant.admin_key)
    body = {"limit": "1", "period": "day"}
    budget = await service.send("POST", f"{console}/budgets", body, key=tenant.admin_key)
    upload, batch = await _batch(service, tenant)
    queued = await service.post(
        f"/client/v4/accounts/{account.id}/ai/run/{service.model}?queueRequest=true",
        {"requests": [{"prompt": "x"}]},
        key=tenant.api_key,
    )
    asked = {"model": service.model, "input": "x", "max_output_tokens": 2, "store": True}
    kept = await service.post("/v1/responses", asked, key=tenant.api_key)
    lines = 3  # of the batch, of the queued run and of this, so that nothing moves by itself any more

    async def over() -> bool:
        found = await service.send("GET", f"{console}/requests", key=tenant.admin_key)
        state = await service.send("GET", f"/v1/batches/{batch}", key=tenant.api_key)
        return len(found.json()["requests"]) == 1 + lines and state.json()["status"] == "completed"

    await eventually_async(over, within_s=30, what="ended batches")
    tenant.ids.update(
        account_id=account.id,
        key_id=issued[KeyKind.INFERENCE].key.id,
        project_id=projects.open_project(database, account.id, "p").id,
        service_account_id=service_accounts.add_service_account(database, account.id, "s", Role.VIEWER).id,
        user_id=user.id,
        number=str(invoices[0]["number"]),
        budget_id=budget.json()["id"],
        webhook_id=webhook.json()["id"],
        request_id=request_id,
        file_id=upload,
        batch_id=batch,
        response_id=kept.json()["id"],
        queued_id=queued.json()["result"]["request_id"],
    )
    return tenant


async def _batch(service: Service, tenant: Tenant) -> tuple[str, str]:
    line: dict[str, Any] = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    line |= {"body": {"model": service.model, "messages": [{"role": "user", "content": "x"}]}}
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n%b\n\r\n--b--\r\n'
    ) % json.dumps(line).encode()
    headers = {"content-type": "multipart/form-data; boundary=b"}
    upload = (await service.post("/v1/files", form, key=tenant.api_key, headers=headers)).json()["id"]
    body = {"input_file_id": upload, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return upload, (await service.post("/v1/batches", body, key=tenant.api_key)).json()["id"]


def _ids(tenant: Tenant, path: str) -> dict[str, str]:
    """`request_id` is a batch of Workers AI under one path, and a record of the console under another."""
    return tenant.ids | {"request_id": tenant.ids["queued_id"]} if path.startswith("/client/") else tenant.ids


def _unknown(known: str) -> str:
    """An id of the same form that nobody has."""
    if known.isdigit():
        return "9" * 6
    prefix, _, tail = known.rpartition("-") if known.startswith(("file-", "batch-")) else known.rpartition("_")
    separator = known[len(prefix) : len(known) - len(tail)]
    return prefix + separator + re.sub(r"[0-9a-f]", lambda digit: "f" if digit[0] != "f" else "e", tail)


def _told(answer: Answer, *ids: str) -> tuple[int, str, dict[str, str]]:
    """What an answer says, but for the ids that were asked for and what each request has of its own."""

    def told(text: str) -> str:
        for one in ids:
            text = text if one.isdigit() else text.replace(one, "ID")
        return _UNIQUE.sub("REQUEST", text)

    headers = {name: told(value) for name, value in answer.headers.items() if name not in _OF_THE_REQUEST}
    return answer.status, told(answer.body.decode()), headers


@pytest.fixture(params=["sqlite", "behind the wall"])
async def service(
    request: pytest.FixtureRequest, tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> AsyncIterator[Service]:
    """On SQLite, and on a PostgreSQL with row-level security, connected as an ordinary role."""
    with ExitStack() as opened:
        settings: dict[str, Any] = {}
        if request.param != "sqlite":
            server: PostgresServer = request.getfixturevalue("postgres")
            settings["database_url"] = opened.enter_context(walled_database(server))
        async with running_service(tmp_path / "home", checkpoint, engine, **settings) as service:
            yield service


@pytest.fixture
async def tenants(service: Service) -> tuple[Tenant, Tenant]:
    return await _tenant(service, "mine"), await _tenant(service, "theirs")


async def _operations(service: Service) -> list[tuple[str, str, list[str]]]:
    """(method, path, its parameters but for the account) of every route that has some."""
    document = (await service.send("GET", "/openapi.json")).json()
    found = []
    for path, methods in document["paths"].items():
        names = [name for name in re.findall(r"{(\w+)}", path) if name not in _OF_NOBODY]
        found += [(method.upper(), path, names) for method in methods if names]
    return found


async def _everything(service: Service, tenant: Tenant) -> dict[str, Answer]:
    """All that a tenant can read of its own."""
    answers = {}
    for method, path, _ in await _operations(service):
        if method == "GET":
            filled = path.format(**_ids(tenant, path) | {"model": service.model})
            filled += f"?model={service.model}" if path.endswith("/schema") else ""
            answers[path] = await service.send("GET", filled, key=tenant.key_for(path))
    return answers


@pytest.mark.timeout(120)
async def test_a_foreign_id_is_answered_as_an_unknown_one_on_every_route(
    service: Service, tenants: tuple[Tenant, Tenant]
) -> None:
    mine, theirs = tenants
    before = await _everything(service, theirs)
    # What is compared exists: its own account reads it.
    assert {path: answer.status for path, answer in before.items() if answer.status != 200} == {}
    walked = 0
    for method, path, names in await _operations(service):
        own, foreign = _ids(mine, path) | {"model": service.model}, _ids(theirs, path)
        assert set(names) <= foreign.keys(), f"make an id for {path}"
        for name in names:
            unknown = _unknown(foreign[name])
            assert unknown != foreign[name]
            body = _BODIES.get((method, name), {} if method in {"POST", "PATCH", "PUT"} else None)
            told = [
                _told(
                    await service.send(method, path.format(**own | {name: one}), body, key=mine.key_for(path)),
                    one,
                    mine.account_id,
                )
                for one in (foreign[name], unknown)
            ]
            assert told[0] == told[1], (method, path, name)
            assert 400 <= told[0][0] < 500, (method, path, name, told[0])
            walked += 1
    assert walked > 50
    after = await _everything(service, theirs)
    of_time = {"/console/v1/accounts/{account_id}/usage", "/console/v1/accounts/{account_id}/costs"}
    of_time |= {"/console/v1/accounts/{account_id}/latency", "/console/v1/accounts/{account_id}/keys"}
    of_time |= {path for path in before if "/keys/" in path or path.endswith(("/ai/usage", "/limits"))}
    for path in before.keys() - of_time:
        assert before[path].body == after[path].body, f"{path} shows that something was changed"
    assert [key["state"] for key in after["/console/v1/accounts/{account_id}/keys"].json()["keys"]] == ["enabled"] * 2


_NAMED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/keys", {"name": "k", "project_id": "{project_id}"}),
    ("POST", "/keys", {"name": "k", "service_account_id": "{service_account_id}"}),
    ("PUT", "/limits", {"meter": "requests_per_day", "limit": 5, "project_id": "{project_id}"}),
    ("PUT", "/limits", {"meter": "requests_per_day", "limit": 5, "key_id": "{key_id}"}),
    ("DELETE", "/limits?meter=requests_per_day&project_id={project_id}", None),
    ("DELETE", "/limits?meter=requests_per_day&key_id={key_id}", None),
    ("POST", "/budgets", {"limit": "1", "period": "day", "project_id": "{project_id}"}),
    ("POST", "/budgets", {"limit": "1", "period": "day", "key_id": "{key_id}"}),
    ("POST", "/v1/responses", {"previous_response_id": "{response_id}", "input": "x", "model": "{model}"}),
    ("POST", "/v1/batches", {"input_file_id": "{file_id}", "endpoint": "/v1/chat/completions"}),
    ("GET", "/usage?key={key_id}", None),
    ("GET", "/usage?project={project_id}", None),
    ("GET", "/costs?project={account_id}", None),
    ("GET", "/requests?key={key_id}", None),
    ("GET", "/requests?project={project_id}", None),
]


@pytest.mark.timeout(120)
async def test_a_foreign_id_in_a_body_or_a_filter_is_as_unknown(
    service: Service, tenants: tuple[Tenant, Tenant]
) -> None:
    mine, theirs = tenants
    unknown = {name: _unknown(known) for name, known in theirs.ids.items()}
    for method, tail, body in _NAMED:
        told = []
        for ids in (theirs.ids, unknown):
            path = tail.format(**ids)
            path = path if path.startswith("/v1") else f"/console/v1/accounts/{mine.account_id}{path}"
            filled = body and {
                name: value.format(**ids, model=service.model) if isinstance(value, str) else value
                for name, value in body.items()
            }
            if filled is not None and "input_file_id" in filled:
                filled["completion_window"] = "24h"
            answer = await service.send(method, path, filled, key=mine.key_for(path))
            (asked,) = {*re.findall(r"{(\w+)}", tail + json.dumps(body))} & ids.keys()
            status, said, _ = _told(answer, ids[asked], mine.account_id)
            told.append((status, re.sub(r'"(from|to)":"[^"]*"', "", said)))
        assert told[0] == told[1], (method, tail)
