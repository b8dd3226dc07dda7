"""A real PostgreSQL that is killed, hangs and comes back: known keys go on, and no key is called bad for it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from tenancy import provisioning
from tenancy.authenticate import Authenticator
from tenancy.database import Database, open_database
from tenancy.errors import TenancyUnavailable
from tenancy.keys import KeyKind, new_key_text
from tests.doubles.own_time import OwnTime
from tests.doubles.waiting import eventually, eventually_async
from tests.stores import Away, PostgresServer
from tests.tenancy.conftest import PEPPER

pytestmark = pytest.mark.stores

# Three times what is promised, for a machine that does ten things at once.
RECOVERY_S_MAX = 15.0


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """To be mistreated; each test leaves it running."""
    with PostgresServer() as server:
        yield server


@dataclass
class World:
    database: Database
    authenticator: Authenticator
    known: str
    unseen: str


@pytest.fixture
async def world(server: PostgresServer) -> AsyncIterator[World]:
    with server.database() as url:
        database = open_database(url, busy_timeout_s=2)
        account = provisioning.open_account(database, "acme", clock=time.time_ns)
        known, unseen = (
            provisioning.issue_key(database, PEPPER, account.id, name="x", kind=KeyKind.INFERENCE, clock=time.time_ns)
            for _ in range(2)
        )
        authenticator = Authenticator(database, PEPPER, ttl_s=0.05, negative_ttl_s=0.05)
        await authenticator.authenticate(known.text)
        yield World(database, authenticator, known.text, unseen.text)
        await authenticator.close()
        database.close()


async def _answers(world: World) -> bool:
    try:
        await world.authenticator.authenticate(world.unseen)
    except TenancyUnavailable:
        return False
    return True


@pytest.mark.parametrize("how", ["killed", "hanging"])
async def test_known_keys_go_on_and_all_recovers_by_itself(
    server: PostgresServer, world: World, how: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenancy.authenticate._STALE_WAIT_S", 0.08)  # as it is outside of tests
    with server.away(how) as come_back, OwnTime() as own:
        slowest = 0.0
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            started = own.now()
            await world.authenticator.authenticate(world.known)
            slowest = max(slowest, own.since(started))
            await asyncio.sleep(0.02)
        assert slowest < 1.0
        if how == "killed":
            for token in (world.unseen, new_key_text(KeyKind.INFERENCE)):
                with pytest.raises(TenancyUnavailable):
                    await world.authenticator.authenticate(token)
        come_back()
        await eventually_async(lambda: _answers(world), within_s=RECOVERY_S_MAX, what="recovery")


async def test_a_call_that_hangs_ends_with_the_database_that_is_closed(server: PostgresServer) -> None:
    with server.database() as url:
        database = open_database(url, busy_timeout_s=2)

        def ask() -> object:
            with database.read() as connection:
                return connection.scalar(sa.text("SELECT 1"))

        assert await database.call(ask) == 1
        with server.away("hanging"):
            call = asyncio.create_task(database.call(ask))
            await eventually(lambda: database.away, what="a call that hangs")
            await asyncio.to_thread(database.close)
            with pytest.raises(TenancyUnavailable):
                await call
