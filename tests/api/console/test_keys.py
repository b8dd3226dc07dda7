"""An account's keys over the console, on a real database: shown once, never above the issuer, foreign as unknown."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from api.settings import Settings
from tenancy import provisioning
from tenancy.authenticate import Authenticator
from tenancy.database import open_database
from tenancy.keys import KeyKind
from tenancy.pepper import open_pepper
from tests.api.exchange import Exchange, call
from tests.fakes import Fakes, fake_services
from tests.migrated import copy_migrated


@dataclass
class Console:
    """One account with an admin key, and another account."""

    app: ASGIApp
    account_id: str
    admin: provisioning.IssuedKey
    other_id: str
    other: provisioning.IssuedKey

    async def ask(self, method: str, tail: str = "", body: object = b"", **options: Any) -> Exchange:
        values = {"key": self.admin.text, "account_id": self.account_id} | options
        path = f"/console/v1/accounts/{values.pop('account_id')}/keys{tail}"
        return await call(self.app, method, path, body=body, **values)

    async def issue(self, **body: Any) -> dict[str, Any]:
        answer = await self.ask("POST", body={"name": "ci"} | body)
        assert answer.status == 201, answer.body
        issued: dict[str, Any] = answer.json
        return issued


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    settings = Settings.model_validate({"home": tmp_path, "cache_dir": tmp_path})
    copy_migrated(tmp_path)
    database = open_database(settings.database_url)
    pepper = open_pepper(settings.pepper_path)
    accounts = [provisioning.open_account(database, name, clock=time.time_ns) for name in ("acme", "other")]
    keys = [
        provisioning.issue_key(database, pepper, account.id, name="a", kind=KeyKind.ADMIN, clock=time.time_ns)
        for account in accounts
    ]
    # No cache to speak of: what a test changes is seen at once, however slow the database is.
    authenticator = Authenticator(database, pepper, ttl_s=1e-9, negative_ttl_s=1e-9, stale_s=0)
    services = replace(fake_services(Fakes()), settings=settings, database=database, authenticator=authenticator)
    yield Console(create_app(services), accounts[0].id, keys[0], accounts[1].id, keys[1])
    database.close()


async def test_a_key_is_issued_shown_once_and_works(console: Console) -> None:
    issued = await console.issue(models=["@cf/a/b"], networks=["192.0.2.0/24"], expires_at="2099-01-01")
    text = issued.pop("key")
    assert text.startswith("pgi_live_")
    assert (issued["kind"], issued["state"], issued["lineage_id"]) == ("inference", "enabled", issued["id"])
    assert (issued["models"], issued["networks"]) == (["@cf/a/b"], ["192.0.2.0/24"])
    assert issued["expires_at"] == "2099-01-01T00:00:00.000000Z"
    listed = await console.ask("GET")
    assert issued in listed.json["keys"]
    assert text not in listed.body.decode()
    assert (await console.ask("GET", f"/{issued['id']}")).json == issued


async def test_the_answer_with_the_text_is_not_kept_by_anyone(console: Console) -> None:
    answer = await console.ask("POST", body={"name": "ci"})
    assert answer.headers["cache-control"] == "no-store"


async def test_a_key_is_disabled_enabled_and_revoked(console: Console) -> None:
    issued = await console.issue(kind="admin")
    tail = f"/{issued['id']}"
    for disabled, state, status in ((True, "disabled", 401), (False, "enabled", 200)):
        assert (await console.ask("PATCH", tail, {"disabled": disabled})).json["state"] == state
        assert (await console.ask("GET", key=issued["key"])).status == status
    assert (await console.ask("DELETE", tail)).json["state"] == "revoked"
    assert (await console.ask("GET", key=issued["key"])).status == 401
    assert (await console.ask("DELETE", tail)).status == 200


async def test_a_rotated_key_has_a_successor_and_an_end(console: Console) -> None:
    issued = await console.issue()
    answer = await console.ask("POST", f"/{issued['id']}/rotate", {"grace_seconds": 60})
    assert answer.status == 201
    assert answer.json["lineage_id"] == issued["id"]
    assert answer.json["key"] != issued["key"]
    assert (await console.ask("GET", f"/{issued['id']}")).json["expires_at"] is not None
    assert (await console.ask("POST", f"/{issued['id']}/rotate")).status == 201, "an hour of grace, if none is named"


@pytest.mark.parametrize(
    ("method", "tail", "body"),
    [
        ("GET", "", b""),
        ("POST", "", {"name": "x"}),
        ("GET", "/{key}", b""),
        ("PATCH", "/{key}", {"disabled": True}),
        ("DELETE", "/{key}", b""),
        ("POST", "/{key}/rotate", b""),
    ],
)
async def test_foreign_and_unknown_are_the_same(console: Console, method: str, tail: str, body: object) -> None:
    of_account = [
        await console.ask(method, tail.format(key=console.other.key.id), body, account_id=account_id)
        for account_id in (console.other_id, "0" * 32, "nonsense")
    ]
    assert {answer.status for answer in of_account} == {404}
    assert {answer.json["detail"] for answer in of_account} == {"There is no such account."}
    if tail:
        of_key = [
            await console.ask(method, tail.format(key=key), body)
            for key in (console.other.key.id, "0" * 32, "nonsense")
        ]
        assert {(answer.status, answer.json["code"]) for answer in of_key} == {(404, "key_not_found")}
        assert len({answer.json["detail"] for answer in of_key}) == 1
    own = await console.ask("GET", key=console.other.text, account_id=console.other_id)
    assert [key["state"] for key in own.json["keys"]] == ["enabled"]


async def test_inference_keys_do_not_administer(console: Console) -> None:
    issued = await console.issue()
    for method, tail in (("GET", ""), ("POST", ""), ("DELETE", f"/{issued['id']}")):
        answer = await console.ask(method, tail, {"name": "x"}, key=issued["key"])
        assert (answer.status, answer.json["code"]) == (403, "scope_missing")


class TestNobodyGrantsMoreThanTheyHave:
    async def test_scopes_of_admin_keys(self, console: Console) -> None:
        lesser = (await console.issue(kind="admin", scopes=["account:admin", "ai:read"]))["key"]
        answer = await console.ask("POST", body={"name": "x", "kind": "admin", "scopes": ["operator:read"]}, key=lesser)
        assert (answer.status, answer.json["code"]) == (403, "scope_missing")
        answer = await console.ask("POST", f"/{console.admin.key.id}/rotate", key=lesser)
        assert (answer.status, answer.json["code"]) == (403, "scope_missing")
        answer = await console.ask("POST", body={"name": "x", "kind": "admin"}, key=lesser)
        assert answer.json["scopes"] == ["account:admin", "ai:read"], "all that it has itself"
        answer = await console.ask("POST", body={"name": "x"}, key=lesser)
        assert answer.json["scopes"] == ["ai:read", "ai:run", "usage:read"], "it may let others infer"

    async def test_networks(self, console: Console) -> None:
        bound = (await console.issue(kind="admin", networks=["127.0.0.0/8", "2001:db8::/32"]))["key"]
        answer = await console.ask("POST", body={"name": "x"}, key=bound)
        assert answer.json["networks"] == ["127.0.0.0/8", "2001:db8::/32"]
        for networks, status in ((["127.1.0.0/16"], 201), (["2001:db8:1::/48"], 201), (["0.0.0.0/0"], 403)):
            answer = await console.ask("POST", body={"name": "x", "networks": networks}, key=bound)
            assert answer.status == status, networks
        unbound = await console.issue()
        answer = await console.ask("POST", f"/{unbound['id']}/rotate", key=bound)
        assert (answer.status, answer.json["code"]) == (403, "address_not_allowed")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "x", "kind": "root"},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["account:admin"]},
        {"name": "x", "expires_at": "yesterday"},
        {"name": "x", "expires_at": "2001-01-01"},
        {"name": "x", "models": ["a b"]},
        {"name": "x", "networks": ["192.0.2.1/24"]},
        {"name": "x", "extra": 1},
    ],
)
async def test_what_can_not_be_is_said_and_leaves_nothing(console: Console, body: dict[str, Any]) -> None:
    answer = await console.ask("POST", body=body)
    assert answer.status == 400, answer.body
    assert answer.headers["content-type"] == "application/problem+json"
    assert len((await console.ask("GET")).json["keys"]) == 1
