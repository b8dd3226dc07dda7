"""What two do to members in the same moment, on PostgreSQL: on SQLite the second begins when the first has ended."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
import sqlalchemy as sa

from tenancy import people, provisioning
from tenancy.audit_log import COMMAND_LINE, Actor, ActorKind, wait_turn
from tenancy.database import Database
from tenancy.errors import LinkInvalid, MembershipConflict, RightMissing
from tenancy.keys import KeyKind
from tenancy.principal import Scope
from tenancy.roles import Role
from tests.doubles.waiting import eventually
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import POSTGRESQL
from tests.tenancy.people import add_user, open_account

pytestmark = pytest.mark.parametrize("database_url", [POSTGRESQL], indirect=True)

_WAITING = sa.text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


async def _refused(database: Database, *deeds: Callable[[], object]) -> list[type[BaseException]]:
    """How those end that do not end well, where each has gone as far as it can before any of them is done."""

    def all_wait() -> bool:
        with database.read() as connection:
            return bool(connection.scalar(_WAITING) == len(deeds))

    with database.write() as connection:
        wait_turn(connection)  # each waits at the latest for its entry in the log
        running = [asyncio.ensure_future(asyncio.to_thread(deed)) for deed in deeds]
        await eventually(all_wait, what="deeds that wait")
    ended = await asyncio.gather(*running, return_exceptions=True)
    return [type(one) for one in ended if isinstance(one, BaseException)]


async def test_two_owners_who_remove_each_other_leave_one(database: Database, clock: SettableClock) -> None:
    acme = open_account(database, clock)
    owners = [add_user(database, clock, f"{name}@example.com") for name in ("ann", "bob")]
    for user in owners:
        people.set_member(database, acme, user.id, Role.OWNER, by=COMMAND_LINE, clock=clock)
    remove = partial(people.set_member, database, acme, role=None, by=COMMAND_LINE, clock=clock)
    assert await _refused(database, *(partial(remove, user.id) for user in owners)) == [MembershipConflict]
    assert len(people.list_members(database, acme)) == 1


async def test_of_two_who_follow_an_invitation_one_joins(database: Database, clock: SettableClock) -> None:
    acme = open_account(database, clock)
    users = [add_user(database, clock, f"{name}@example.com") for name in ("ann", "eve")]
    token = people.invite(database, acme, "ann@example.com", Role.ADMIN, by=COMMAND_LINE, clock=clock)
    follow = partial(people.accept_invitation, database, token, clock=clock)
    assert await _refused(database, *(partial(follow, user_id=user.id) for user in users)) == [LinkInvalid]
    assert len(people.list_members(database, acme)) == 1


async def test_an_invitation_that_is_followed_while_it_is_withdrawn_ends_once(
    database: Database, clock: SettableClock
) -> None:
    """Whichever comes first. Each held what the other wanted."""
    acme = open_account(database, clock)
    for number in range(10):
        token = people.invite(database, acme, "ann@example.com", Role.ADMIN, by=COMMAND_LINE, clock=clock)
        user = add_user(database, clock, f"{number}@example.com")
        follow = partial(people.accept_invitation, database, token, user_id=user.id, clock=clock)
        withdraw = partial(people.withdraw_invitations, database, acme, by=COMMAND_LINE, clock=clock)
        assert await _refused(database, follow, withdraw) in ([], [LinkInvalid])
        assert people.count_invitations(database, acme, clock=clock) == 0


async def test_who_is_removed_while_inviting_leaves_no_invitation(database: Database, clock: SettableClock) -> None:
    acme = open_account(database, clock)
    for number in range(5):
        admin = add_user(database, clock, f"{number}@example.com")
        people.set_member(database, acme, admin.id, Role.ADMIN, by=COMMAND_LINE, clock=clock)
        remove = partial(people.set_member, database, acme, admin.id, None, by=COMMAND_LINE, clock=clock)
        by = Actor(ActorKind.USER, admin.id)
        invite = partial(people.invite, database, acme, "eve@example.com", Role.ADMIN, by=by, clock=clock)
        assert await _refused(database, remove, invite) in ([], [RightMissing])
        assert people.count_invitations(database, acme, clock=clock) == 0


async def test_a_key_that_is_revoked_while_it_invites_leaves_no_invitation(
    database: Database, clock: SettableClock
) -> None:
    acme = open_account(database, clock)
    for _ in range(5):
        key = provisioning.issue_key(
            database, b"p" * 32, acme, name="admin", kind=KeyKind.ADMIN, scopes=[Scope.ACCOUNT_ADMIN], clock=clock
        ).key
        revoke = partial(provisioning.revoke_key, database, acme, key.id, clock=clock)
        by = Actor(ActorKind.KEY, key.id)
        invite = partial(people.invite, database, acme, "eve@example.com", Role.ADMIN, by=by, clock=clock)
        assert await _refused(database, revoke, invite) in ([], [RightMissing])
        assert people.count_invitations(database, acme, clock=clock) == 0
