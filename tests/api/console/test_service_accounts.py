"""An account's service accounts over the console and the command line, on a real database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.console.administered import Administered, administered


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Administered]:
    with administered(tmp_path) as world:
        yield world


async def test_one_is_added_has_keys_and_is_disabled(world: Administered) -> None:
    added = await world.ask("POST", "/service_accounts", {"name": "deploy", "role": "admin"})
    assert (added.status, added.json["state"]) == (201, "enabled")
    owner_id = added.json["id"]
    key = (await world.ask("POST", "/keys", {"name": "k", "kind": "admin", "service_account_id": owner_id})).json
    assert (key["service_account_id"], key["scopes"]) == (owner_id, ["account:admin", "ai:read", "usage:read"])
    assert (await world.ask("GET", "/keys", key=key["key"])).status == 200
    assert (await world.ask("PATCH", f"/service_accounts/{owner_id}", {"role": "viewer"})).json["role"] == "viewer"
    assert (await world.ask("GET", "/keys", key=key["key"])).status == 403
    changed = await world.ask("PATCH", f"/service_accounts/{owner_id}", {"disabled": True})
    assert changed.json["state"] == "disabled"
    assert (await world.ask("GET", "/keys", key=key["key"])).json["code"] == "disabled_api_key"
    assert (await world.ask("GET", "/service_accounts")).json == {"service_accounts": [changed.json]}
    assert (await world.ask("GET", f"/service_accounts/{owner_id}")).json == changed.json


@pytest.mark.parametrize(
    "body", [{}, {"name": "x", "role": "owner"}, {"name": "x", "role": "king"}, {"name": ""}, {"name": "x", "more": 1}]
)
async def test_what_can_not_be_is_refused(world: Administered, body: dict[str, object]) -> None:
    assert (await world.ask("POST", "/service_accounts", body)).status == 400


async def test_a_foreign_one_is_answered_as_an_unknown_one(world: Administered) -> None:
    theirs = await world.ask(
        "POST", "/service_accounts", {"name": "x"}, key=world.other.text, account_id=world.other_id
    )
    answers = set()
    for owner_id in (theirs.json["id"], "f" * 32):
        for method, tail, body in (
            ("GET", f"/service_accounts/{owner_id}", b""),
            ("PATCH", f"/service_accounts/{owner_id}", {"disabled": True}),
            ("POST", "/keys", {"name": "k", "service_account_id": owner_id}),
        ):
            answer = await world.ask(method, tail, body)
            answers.add((answer.status, answer.json["code"], answer.json["detail"]))
    assert answers == {(404, "service_account_not_found", "There is no such service account in this account.")}


async def test_an_admin_key_can_not_grant_by_silence_what_it_lacks(world: Administered) -> None:
    lesser = (await world.ask("POST", "/keys", {"name": "k", "kind": "admin", "scopes": ["account:admin"]})).json["key"]
    issued = await world.ask("POST", "/keys", {"name": "k", "kind": "admin"}, key=lesser)
    assert (issued.status, issued.json["scopes"]) == (201, ["account:admin"])
