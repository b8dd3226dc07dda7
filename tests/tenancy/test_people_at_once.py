"""What two do to members in the same moment, on PostgreSQL: on SQLite the second begins when the first has ended."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
import sqlalchemy as sa

from tenancy import people
from tenancy.audit_log import COMMAND_LINE, wait_turn
from tenancy.database import Database
from tenancy.errors import LinkInvalid, MembershipConflict
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
