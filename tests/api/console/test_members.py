"""Members, invitations and the audit log over the console, on a real database."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenancy import people
from tenancy.audit_log import COMMAND_LINE
from tenancy.errors import LinkInvalid
from tenancy.roles import Role
from tenancy.users import User
from tests.api.console.administered import Administered, administered
from tests.api.exchange import get
from tests.fakes import KEY

_NOBODY = "0" * 32


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Administered]:
    with administered(tmp_path) as opened:
        yield opened


def _member(console: Administered, email: str, role: Role, account_id: str | None = None) -> User:
    database, clock = console.database, time.time_ns
    user = people.add_user(database, email=email, name="Someone", by=COMMAND_LINE, clock=clock)
    people.set_member(database, account_id or console.account_id, user.id, role, by=COMMAND_LINE, clock=clock)
    return user


async def test_an_invitation_is_accepted_by_its_link_alone(console: Administered) -> None:
    answer = await console.ask("POST", "/invitations", {"email": "bob@example.com", "role": "developer"})
    assert answer.status == 201, answer.body
    assert answer.headers["cache-control"] == "no-store"
    token = answer.json["path"].removeprefix("/dashboard/link/")
    user = people.accept_invitation(console.database, token, name="Bob", password_hash="h", clock=time.time_ns)
    members = (await console.ask("GET", "/members")).json["members"]
    assert [(one["user_id"], one["email"], one["role"]) for one in members] == [
        (user.id, "bob@example.com", "developer")
    ]


async def test_open_invitations_are_withdrawn(console: Administered) -> None:
    answer = await console.ask("POST", "/invitations", {"email": "bob@example.com", "role": "developer"})
    token = answer.json["path"].removeprefix("/dashboard/link/")
    for _ in range(2):
        assert (await console.ask("DELETE", "/invitations")).status == 204
    with pytest.raises(LinkInvalid):
        people.accept_invitation(console.database, token, name="Bob", password_hash="h", clock=time.time_ns)
    entries = (await console.ask("GET", "/audit")).json["entries"]
    assert [entry["action"] for entry in entries].count("member.withdraw_invitations") == 1


async def test_members_change_roles_and_leave(console: Administered) -> None:
    user = _member(console, "bob@example.com", Role.VIEWER)
    changed = await console.ask("PATCH", f"/members/{user.id}", {"role": "billing"})
    assert (changed.status, changed.json["role"]) == (200, "billing")
    assert (await console.ask("DELETE", f"/members/{user.id}")).status == 204
    assert (await console.ask("GET", "/members")).json == {"members": []}


async def test_an_admin_key_touches_no_owner(console: Administered) -> None:
    owner, user = _member(console, "ann@example.com", Role.OWNER), _member(console, "bob@example.com", Role.VIEWER)
    for answer in (
        await console.ask("DELETE", f"/members/{owner.id}"),
        await console.ask("PATCH", f"/members/{owner.id}", {"role": "viewer"}),
        await console.ask("PATCH", f"/members/{user.id}", {"role": "owner"}),
        await console.ask("POST", "/invitations", {"email": "eve@example.com", "role": "owner"}),
    ):
        assert (answer.status, answer.json["code"]) == (403, "right_missing")
        assert answer.headers["content-type"] == "application/problem+json"


async def test_another_accounts_member_is_as_unknown_as_nobody(console: Administered) -> None:
    foreign = _member(console, "eve@example.com", Role.VIEWER, console.other_id)
    said = set()
    for user_id in (foreign.id, _NOBODY):
        for method, body in (("PATCH", {"role": "viewer"}), ("DELETE", b"")):
            answer = await console.ask(method, f"/members/{user_id}", body)
            said.add((answer.status, answer.json["code"], answer.json["detail"]))
    assert len(said) == 1
    assert said.pop()[:2] == (404, "member_not_found")
    for account_id in (console.other_id, _NOBODY):
        for path in ("/members", "/audit"):
            answer = await console.ask("GET", path, account_id=account_id)
            assert (answer.status, answer.json["code"]) == (404, "account_not_found")


@pytest.mark.parametrize("body", [{}, {"email": "x"}, {"email": "x", "role": "viewer"}, {"email": "a@b", "role": "x"}])
async def test_what_is_no_invitation_is_refused(console: Administered, body: dict[str, str]) -> None:
    assert (await console.ask("POST", "/invitations", body)).status == 400


async def test_every_change_over_the_console_is_the_keys_in_the_log(console: Administered) -> None:
    """Each route that changes something: one that forgot to say who it was would be the command line's here."""
    user = _member(console, "bob@example.com", Role.VIEWER)
    before = (await console.ask("GET", "/audit?limit=1")).json["entries"][0]["number"]
    key_id = (await console.ask("POST", "/keys", {"name": "ci"})).json["id"]
    await console.ask("PATCH", f"/keys/{key_id}", {"disabled": True})
    await console.ask("PATCH", f"/keys/{key_id}", {"disabled": False})
    await console.ask("POST", f"/keys/{key_id}/rotate", {"grace_seconds": 60})
    await console.ask("DELETE", f"/keys/{key_id}")
    await console.ask("POST", "/invitations", {"email": "eve@example.com", "role": "viewer"})
    await console.ask("PATCH", f"/members/{user.id}", {"role": "billing"})
    await console.ask("DELETE", f"/members/{user.id}")
    entries = [entry for entry in (await console.ask("GET", "/audit")).json["entries"] if entry["number"] > before]
    assert [entry["action"] for entry in reversed(entries)] == [
        "key.issue",
        "key.disable",
        "key.enable",
        "key.rotate",
        "key.revoke",
        "member.invite",
        "member.set",
        "member.remove",
    ]
    assert {(entry["actor"]["kind"], entry["actor"]["id"]) for entry in entries} == {("key", console.admin.key.id)}


async def test_operators_read_and_verify_the_whole_log(console: Administered) -> None:
    _member(console, "bob@example.com", Role.VIEWER, console.other_id)
    whole = await get(console.app, "/console/v1/audit?limit=2", key=console.admin.text)
    assert [entry["action"] for entry in whole.json["entries"]] == ["member.set", "user.add"]
    rest = await get(console.app, f"/console/v1/audit?before={whole.json['next']}", key=console.admin.text)
    assert {entry["action"] for entry in rest.json["entries"]} == {"account.open", "key.issue"}
    verdict = (await get(console.app, "/console/v1/audit/verify", key=console.admin.text)).json
    assert (verdict["ok"], verdict["entries"]) == (True, 6)
    known = f"known_number={verdict['head']['number']}&known_hash={'0' * 64}"
    doubted = await get(console.app, f"/console/v1/audit/verify?{known}", key=console.admin.text)
    assert doubted.json["broken"] == ["entry 6 is not the one that was noted"]
    users = (await get(console.app, "/console/v1/users", key=console.admin.text)).json["users"]
    assert [user["email"] for user in users] == ["bob@example.com"]


async def test_an_accounts_own_log_tells_of_no_other(console: Administered) -> None:
    _member(console, "bob@example.com", Role.VIEWER, console.other_id)
    entries = (await console.ask("GET", "/audit")).json["entries"]
    assert {entry["account_id"] for entry in entries} == {console.account_id}


@pytest.mark.parametrize("path", ["/audit", "/audit/verify", "/users"])
async def test_what_is_the_operators_is_closed_to_others(console: Administered, path: str) -> None:
    assert (await get(console.app, f"/console/v1{path}", key=None)).status == 401
    assert (await get(console.app, f"/console/v1{path}", key=KEY)).status == 401
