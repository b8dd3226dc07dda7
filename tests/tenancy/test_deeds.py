"""The log of deeds as news: what is told, to whom it was done, and that a cache goes by it."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa

from tenancy import provisioning
from tenancy.accounts import Account
from tenancy.audit_log import COMMAND_LINE, record
from tenancy.authenticate import Authenticator
from tenancy.database import Database, open_database
from tenancy.deed_news import CHANNEL, DeedNews
from tenancy.deeds import Deeds, DeedWatch
from tenancy.errors import KeyRevoked, TenancyUnavailable
from tenancy.keys import KeyKind
from tenancy.meters.servers import listen
from tenancy.model_switches import set_model_disabled
from tenancy.tables import audit_log
from tests.doubles.waiting import eventually
from tests.stores import ValkeyServer
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases


class Heard:
    """What a watch told, and the watch."""

    def __init__(self, database: Database, clock: SettableClock) -> None:
        self.deeds: list[Deeds] = []
        self.refusing = False
        self.watch = DeedWatch(database, self._told, interval_s=60, clock=clock)

    async def _told(self, deeds: Deeds) -> None:
        if self.refusing:
            raise TenancyUnavailable("not now")
        self.deeds.append(deeds)

    async def look(self) -> Deeds:
        await self.watch.look()
        return self.deeds[-1]


@pytest.fixture
def heard(database: Database, clock: SettableClock) -> Heard:
    return Heard(database, clock)


@pytest.fixture
def account(database: Database, clock: SettableClock) -> Account:
    return provisioning.open_account(database, "acme", clock=clock)


@over_both_databases
async def test_each_deed_is_told_once_with_whom_it_was_done_to(
    database: Database, heard: Heard, account: Account, clock: SettableClock
) -> None:
    assert await heard.look() == Deeds(clock(), None, service=True)  # who never looked knows nothing
    assert not await heard.look()
    provisioning.set_suspended(database, account.id, suspended=True, clock=clock)
    other = provisioning.open_account(database, "other", clock=clock)
    clock.advance_s(1)
    assert await heard.look() == Deeds(clock(), frozenset({account.id, other.id}))
    set_model_disabled(database, "@cf/x/y", disabled=True, clock=clock)
    assert await heard.look() == Deeds(clock(), service=True)
    assert not await heard.look()


async def test_what_could_not_be_heeded_is_told_again(
    database: Database, heard: Heard, account: Account, clock: SettableClock
) -> None:
    await heard.look()
    set_model_disabled(database, "@cf/x/y", disabled=True, clock=clock)
    heard.refusing = True
    with pytest.raises(TenancyUnavailable):
        await heard.look()
    heard.refusing = False
    assert (await heard.look()).service


async def test_more_deeds_than_can_be_read_and_another_log_are_anything_to_anybody(
    database: Database, heard: Heard, account: Account, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenancy.deeds._READ_MAX", 3)
    await heard.look()
    for number in range(4):
        provisioning.open_account(database, f"a{number}", clock=clock)
    assert (await heard.look()).accounts is None
    assert not await heard.look()
    with database.write() as connection:  # as where an older copy of the database is put in its place
        connection.execute(audit_log.delete().where(audit_log.c.number > 2))
    assert (await heard.look()).accounts is None
    assert not await heard.look()


def test_only_a_committed_entry_in_the_log_is_a_deed(database: Database, account: Account) -> None:
    deeds: list[int] = []
    database.after_deed = lambda: deeds.append(1)
    provisioning.set_suspended(database, account.id, suspended=True)
    assert len(deeds) == 1
    with database.write() as connection:
        connection.execute(sa.text("UPDATE accounts SET concurrency = 3"))
    with pytest.raises(provisioning.ProvisioningInvalid):
        provisioning.open_account(database, " ", clock=time.time_ns)
    with suppress(LookupError), database.write() as connection:
        record(connection, at_ns=1, by=COMMAND_LINE, account_id=None, action="x", subject="y")
        raise LookupError
    with database.read() as connection:
        connection.execute(sa.select(audit_log)).all()
    with database.write() as connection:
        connection.execute(sa.text("UPDATE accounts SET concurrency = 4"))
    assert len(deeds) == 1


@over_both_databases
async def test_a_watched_key_is_not_looked_up_again_until_something_is_done_to_its_account(
    database: Database, account: Account, clock: SettableClock
) -> None:
    keys = [
        provisioning.issue_key(database, PEPPER, owner.id, name="k", kind=KeyKind.INFERENCE, clock=clock)
        for owner in (account, provisioning.open_account(database, "other", clock=clock))
    ]
    cache = Authenticator(database, PEPPER, clock=clock, watched_s=30)

    async def heed(deeds: Deeds) -> None:
        cache.heed(deeds)

    watch = DeedWatch(database, heed, interval_s=60, clock=clock)
    await watch.look()
    for key in keys:
        await cache.authenticate(key.text)
    for _second in range(20):
        clock.advance_s(1)
        await watch.look()
        assert [cache.cached(key.text) is not None for key in keys] == [True, True]
    provisioning.revoke_key(database, account.id, keys[0].key.id, clock=clock)
    await watch.look()
    assert [cache.cached(key.text) is not None for key in keys] == [False, True]
    with pytest.raises(KeyRevoked):
        await cache.authenticate(keys[0].text)
    clock.advance_s(0.9)  # nobody looked: nothing is believed for longer than without a watch
    assert cache.cached(keys[1].text) is None
    await watch.look()
    assert cache.cached(keys[1].text) is not None
    clock.advance_s(11)
    await watch.look()
    assert cache.cached(keys[1].text) is None  # looked up anew after all, whatever the log says
    await cache.close()


async def test_a_look_up_that_was_under_way_when_news_came_is_not_kept(
    database: Database, account: Account, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = provisioning.issue_key(database, PEPPER, account.id, name="k", kind=KeyKind.INFERENCE, clock=clock)
    cache = Authenticator(database, PEPPER, clock=clock)
    read, call = asyncio.Event(), database.call

    async def slowly(*words: Any) -> object:
        found: object = await call(*words)
        await read.wait()
        return found

    monkeypatch.setattr(database, "call", slowly)
    asking = asyncio.create_task(cache.authenticate(key.text))
    await eventually(lambda: bool(cache._lookups))
    cache.heed(Deeds(clock(), frozenset({account.id})))
    read.set()
    await asking
    assert cache.cached(key.text) is None
    await cache.close()


@asynccontextmanager
async def _process(url: str, valkey_url: str) -> AsyncIterator[tuple[Database, Authenticator]]:
    """A gateway process as far as keys go, which looks by itself once a minute."""
    database = open_database(url)
    cache = Authenticator(database, PEPPER, ttl_s=60)
    looks = 0

    async def heed(deeds: Deeds) -> None:
        nonlocal looks
        looks += 1
        cache.heed(deeds)

    watch, news = DeedWatch(database, heed, interval_s=60, clock=time.time_ns), DeedNews(valkey_url)
    loop = asyncio.get_running_loop()
    database.after_deed = lambda: loop.call_soon_threadsafe(news.poke)
    tasks = [
        asyncio.create_task(one) for one in (watch.run(), news.run(), listen(valkey_url, lambda: [CHANNEL], watch.poke))
    ]
    await eventually(lambda: looks > 0, what="a first look")
    yield database, cache
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await cache.close()
    database.close()


@pytest.mark.stores
async def test_a_revocation_is_heard_by_every_process_at_once(database_url: str, valkey: ValkeyServer) -> None:
    async with _process(database_url, valkey.url) as (first, cache), _process(database_url, valkey.url) as (_, others):
        account = provisioning.open_account(first, "acme", clock=time.time_ns)
        key = provisioning.issue_key(first, PEPPER, account.id, name="k", kind=KeyKind.INFERENCE, clock=time.time_ns)
        for one in (cache, others):
            await one.authenticate(key.text)
        await eventually_told(first, account.id, [cache, others], key.text)
        provisioning.revoke_key(first, account.id, key.key.id, clock=time.time_ns)
        await eventually(
            lambda: cache.cached(key.text) is None and others.cached(key.text) is None, within_s=10, what="the news"
        )
        with pytest.raises(KeyRevoked):
            await others.authenticate(key.text)


async def eventually_told(database: Database, account_id: str, caches: list[Authenticator], token: str) -> None:
    """Who has begun to listen is not known: something is done until all have heard of it."""
    until = time.monotonic() + 10
    while any(cache.cached(token) is not None for cache in caches):
        assert time.monotonic() < until, "nobody listens"
        provisioning.set_turns(database, account_id, tier=1, weight_percent=100, clock=time.time_ns)
        await asyncio.sleep(0.05)
    for cache in caches:
        await cache.authenticate(token)
