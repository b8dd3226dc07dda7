"""From token to principal: every refusal, the cache's promises, and a database that is away."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tenancy import provisioning
from tenancy.accounts import Account
from tenancy.authenticate import Authenticator, act_for
from tenancy.claims import Meter
from tenancy.database import Database, open_database
from tenancy.errors import (
    AccountSuspended,
    KeyDisabled,
    KeyExpired,
    KeyMalformed,
    KeyMissing,
    KeyRevoked,
    KeyUnknown,
    TenancyError,
    TenancyUnavailable,
)
from tenancy.keys import KeyKind, new_key_text
from tenancy.principal import Scope
from tenancy.quotas import FREE_PLAN, Plan
from tests.doubles.waiting import eventually
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases

pytestmark = over_both_databases

T = TypeVar("T")
_TTL_S = 0.8


class FlakyDatabase(Database):
    """A real database whose calls can be counted, made to fail, or held until they are let go."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.calls = 0
        self.broken = False
        self.gate: asyncio.Event | None = None

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.broken:
            raise TenancyUnavailable("away")
        return await super().call(function, *args)


@dataclass
class World:
    database: FlakyDatabase
    clock: SettableClock
    authenticator: Authenticator
    account: Account
    key: provisioning.IssuedKey
    extra: list[Authenticator] = field(default_factory=list)

    def issue(self, **options: Any) -> provisioning.IssuedKey:
        values: dict[str, Any] = {"name": "x", "kind": KeyKind.INFERENCE, "clock": self.clock} | options
        return provisioning.issue_key(self.database, PEPPER, self.account.id, **values)


@pytest.fixture
async def world(database_url: str, clock: SettableClock) -> AsyncIterator[World]:
    database = FlakyDatabase(open_database(database_url).engine)
    account = provisioning.open_account(database, "acme", concurrency=4, credit_limit_nano=9, clock=clock)
    key = provisioning.issue_key(database, PEPPER, account.id, name="x", kind=KeyKind.INFERENCE, clock=clock)
    authenticator = Authenticator(database, PEPPER, clock=clock, ttl_s=_TTL_S)
    yield World(database, clock, authenticator, account, key)
    await authenticator.close()
    database.close()


async def _refusal(world: World, token: str | None) -> TenancyError:
    with pytest.raises(TenancyError) as refusal:
        await world.authenticator.authenticate(token)
    return refusal.value


async def test_a_valid_key_gives_its_principal(world: World) -> None:
    principal = await world.authenticator.authenticate(world.key.text)
    assert principal.account_id == world.account.id
    assert principal.key_id == world.key.key.id
    assert principal.scopes == {Scope.AI_RUN, Scope.AI_READ, Scope.USAGE_READ}
    assert (principal.concurrency, principal.credit_limit_nano) == (4, 9)


async def test_whoever_acts_for_an_account_without_a_key_is_bound_as_its_keys_are(world: World) -> None:
    provisioning.set_regions(world.database, world.account.id, ["eu-west"])
    provisioning.set_turns(world.database, world.account.id, tier=2, weight_percent=50)
    found = act_for(world.database, world.account.id, "playground", frozenset({Scope.AI_RUN}))
    assert (found.regions, found.tier, found.weight_percent) == (frozenset({"eu-west"}), 2, 50)


async def test_malformed_and_missing_keys_never_reach_the_database(world: World) -> None:
    for token in (None, "", "sk-1234", world.key.text[:-1], world.key.text[:-1] + "!"):
        assert isinstance(await _refusal(world, token), KeyMissing if not token else KeyMalformed)
    assert world.database.calls == 0


async def test_an_unknown_key_is_refused_and_remembered_for_a_while(world: World) -> None:
    token = new_key_text(KeyKind.INFERENCE)
    for _ in range(5):
        assert isinstance(await _refusal(world, token), KeyUnknown)
    assert world.database.calls == 1


async def test_a_refusal_never_holds_the_key(world: World) -> None:
    token = new_key_text(KeyKind.INFERENCE)
    assert token[9:] not in str(await _refusal(world, token))
    assert token[9:40] not in str(await _refusal(world, token[:-1]))


async def test_a_revoked_key_is_refused_everywhere_within_a_second(world: World) -> None:
    await world.authenticator.authenticate(world.key.text)
    provisioning.revoke_key(world.database, world.account.id, world.key.key.id, clock=world.clock)
    world.clock.advance_s(0.999)
    assert isinstance(await _refusal(world, world.key.text), KeyRevoked)


async def test_a_disabled_key_works_again_within_a_second_of_being_enabled(world: World) -> None:
    provisioning.set_key_disabled(world.database, world.account.id, world.key.key.id, disabled=True)
    assert isinstance(await _refusal(world, world.key.text), KeyDisabled)
    provisioning.set_key_disabled(world.database, world.account.id, world.key.key.id, disabled=False)
    world.clock.advance_s(0.999)
    assert await world.authenticator.authenticate(world.key.text)


async def test_a_suspended_account_is_refused_within_a_second(world: World) -> None:
    await world.authenticator.authenticate(world.key.text)
    provisioning.set_suspended(world.database, world.account.id, suspended=True)
    world.clock.advance_s(0.999)
    assert isinstance(await _refusal(world, world.key.text), AccountSuspended)


async def test_expiry_is_seen_at_its_instant_though_the_key_is_cached(world: World) -> None:
    expires_at_ns = world.clock.now_ns + 300_000_000
    issued = world.issue(expires_at_ns=expires_at_ns)
    await world.authenticator.authenticate(issued.text)
    world.clock.now_ns = expires_at_ns - 1
    assert world.authenticator.cached(issued.text) is not None
    world.clock.now_ns = expires_at_ns
    assert world.authenticator.cached(issued.text) is None
    assert isinstance(await _refusal(world, issued.text), KeyExpired)
    assert world.database.calls == 1


async def test_a_cached_key_is_answered_without_yielding_to_the_loop(world: World) -> None:
    first = await world.authenticator.authenticate(world.key.text)
    assert world.authenticator.cached(world.key.text) is first
    hot = world.authenticator.authenticate(world.key.text)
    with pytest.raises(StopIteration) as returned:
        hot.send(None)
    assert returned.value.value is first
    assert world.database.calls == 1


async def test_the_cache_says_nothing_about_what_it_does_not_know(world: World) -> None:
    for token in (None, "garbage", world.key.text, new_key_text(KeyKind.INFERENCE)):
        assert world.authenticator.cached(token) is None
    assert world.database.calls == 0


async def test_concurrent_misses_share_one_look_up(world: World) -> None:
    world.database.gate = asyncio.Event()
    waiting = [asyncio.create_task(world.authenticator.authenticate(world.key.text)) for _ in range(50)]
    await asyncio.sleep(0)
    world.database.gate.set()
    principals = await asyncio.gather(*waiting)
    assert len({id(principal) for principal in principals}) == 1
    assert world.database.calls == 1


async def test_a_client_that_leaves_does_not_end_the_look_up_of_the_others(world: World) -> None:
    world.database.gate = asyncio.Event()
    leaving, staying = (asyncio.create_task(world.authenticator.authenticate(world.key.text)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    world.database.gate.set()
    assert (await staying).account_id == world.account.id


async def test_trouble_of_the_database_is_never_called_a_bad_key(world: World) -> None:
    world.database.broken = True
    assert isinstance(await _refusal(world, world.key.text), TenancyUnavailable)
    assert isinstance(await _refusal(world, new_key_text(KeyKind.INFERENCE)), TenancyUnavailable)


async def test_a_failed_look_up_is_not_remembered(world: World) -> None:
    world.database.broken = True
    await _refusal(world, world.key.text)
    world.database.broken = False
    assert await world.authenticator.authenticate(world.key.text)


async def test_a_known_key_lives_on_for_thirty_seconds_without_the_database(world: World) -> None:
    await world.authenticator.authenticate(world.key.text)
    world.database.broken = True
    for _ in range(30):
        assert await world.authenticator.authenticate(world.key.text)
        world.clock.advance_s(1)
    assert await world.authenticator.authenticate(world.key.text)
    world.clock.advance_s(1)
    assert isinstance(await _refusal(world, world.key.text), TenancyUnavailable)


async def test_a_key_that_lives_on_is_still_refused_once_expired(world: World) -> None:
    issued = world.issue(expires_at_ns=world.clock.now_ns + 2_000_000_000)
    await world.authenticator.authenticate(issued.text)
    world.database.broken = True
    world.clock.advance_s(2)
    assert isinstance(await _refusal(world, issued.text), KeyExpired)


async def test_an_unknown_key_is_not_called_bad_from_memory_without_the_database(world: World) -> None:
    token = new_key_text(KeyKind.INFERENCE)
    assert isinstance(await _refusal(world, token), KeyUnknown)
    world.database.broken = True
    world.clock.advance_s(1)
    assert isinstance(await _refusal(world, token), TenancyUnavailable)


async def test_a_hanging_database_does_not_hold_up_known_keys_for_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenancy.authenticate._STALE_WAIT_S", 0.01)
    await world.authenticator.authenticate(world.key.text)
    world.database.gate = asyncio.Event()
    world.clock.advance_s(1)
    async with asyncio.timeout(20):
        assert await world.authenticator.authenticate(world.key.text)
    assert world.authenticator.cached(world.key.text) is not None
    world.database.gate.set()


async def test_a_pause_of_the_process_is_no_silence_of_the_database(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenancy.authenticate._STALE_WAIT_S", 60)
    await world.authenticator.authenticate(world.key.text)
    provisioning.revoke_key(world.database, world.account.id, world.key.key.id, clock=world.clock)
    world.clock.advance_s(1)
    world.database.gate = asyncio.Event()
    asking = asyncio.create_task(world.authenticator.authenticate(world.key.text))
    await eventually(lambda: bool(world.authenticator._lookups))
    loop = asyncio.get_running_loop()
    resumed_s = loop.time() + 61
    monkeypatch.setattr(loop, "time", lambda: resumed_s)
    for _ in range(10):  # what is due by now is done
        await asyncio.sleep(0)
    monkeypatch.undo()
    assert not asking.done()
    world.database.gate.set()
    with pytest.raises(KeyRevoked):
        await asking


async def test_only_the_first_request_waits_for_a_database_that_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [world.key, *(world.issue() for _ in range(5))]
    for key in keys:
        await world.authenticator.authenticate(key.text)
    world.database.gate = asyncio.Event()
    world.clock.advance_s(1)
    monkeypatch.setattr("tenancy.authenticate._STALE_WAIT_S", 0.01)
    await world.authenticator.authenticate(keys[0].text)
    monkeypatch.setattr("tenancy.authenticate._STALE_WAIT_S", 60)
    for _round in range(3):
        world.clock.advance_s(1)
        async with asyncio.timeout(20):
            for key in keys:
                await world.authenticator.authenticate(key.text)
    world.database.gate.set()
    provisioning.revoke_key(world.database, world.account.id, world.key.key.id, clock=world.clock)
    await eventually(lambda: not world.authenticator._lookups)
    world.clock.advance_s(0.999)
    assert isinstance(await _refusal(world, world.key.text), KeyRevoked)


async def test_a_clock_set_back_does_not_lengthen_the_cache(world: World) -> None:
    await world.authenticator.authenticate(world.key.text)
    world.clock.advance_s(-3600)
    assert world.authenticator.cached(world.key.text) is None


async def test_a_flood_of_invented_keys_neither_grows_nor_empties_the_cache(world: World) -> None:
    small = Authenticator(world.database, PEPPER, clock=world.clock, max_entries=10)
    await small.authenticate(world.key.text)
    for _ in range(30):
        with pytest.raises(KeyUnknown):
            await small.authenticate(new_key_text(KeyKind.INFERENCE))
    assert len(small._unknown) == 10
    assert small.cached(world.key.text) is not None
    await small.close()


async def test_the_oldest_known_keys_make_room(world: World) -> None:
    small = Authenticator(world.database, PEPPER, clock=world.clock, max_entries=3)
    keys = [world.issue() for _ in range(5)]
    for key in keys:
        await small.authenticate(key.text)
    assert [small.cached(key.text) is not None for key in keys] == [False, False, True, True, True]
    await small.close()


async def test_a_rotated_key_works_until_exactly_the_end_of_its_grace(world: World) -> None:
    new = provisioning.rotate_key(
        world.database, PEPPER, world.account.id, world.key.key.id, grace_s=60, clock=world.clock
    )
    ends_ns = world.clock.now_ns + 60 * 10**9
    for token in (world.key.text, new.text):
        principal = await world.authenticator.authenticate(token)
        assert (principal.lineage_id or principal.key_id) == world.key.key.id
    world.clock.now_ns = ends_ns - 1
    await world.authenticator.authenticate(world.key.text)
    world.clock.now_ns = ends_ns
    assert isinstance(await _refusal(world, world.key.text), KeyExpired)
    await world.authenticator.authenticate(new.text)


async def test_limits_and_bounds_come_with_the_key_and_change_within_a_second(world: World) -> None:
    bound = world.issue(models=["m"], networks=["192.0.2.0/24"])
    principal = await world.authenticator.authenticate(bound.text)
    assert (principal.quotas, principal.models) == ((), frozenset({"m"}))
    assert principal.may_use("m")
    assert not principal.may_use("other")
    assert principal.may_come_from(ip_address("192.0.2.7"))
    assert not principal.may_come_from(ip_address("192.0.3.7"))
    assert not principal.may_come_from(ip_address("2001:db8::1"))
    assert not principal.may_come_from(None)
    quota = provisioning.set_quota(world.database, world.account.id, Meter.REQUESTS_PER_MINUTE, 5)
    provisioning.set_plan(world.database, world.account.id, Plan.FREE)
    world.clock.advance_s(0.999)
    assert (await world.authenticator.authenticate(bound.text)).quotas == (quota, FREE_PLAN)


async def test_the_last_use_is_written_down_and_refused_uses_are_none(world: World) -> None:
    def last_used_at_ns() -> dict[str, int | None]:
        return {key.id: key.last_used_at_ns for key in provisioning.list_keys(world.database, world.account.id)}

    disabled = world.issue().key
    await world.authenticator.note_uses()
    await world.authenticator.authenticate(world.key.text)
    world.clock.advance_s(5)
    await world.authenticator.authenticate(world.key.text)
    provisioning.set_key_disabled(world.database, world.account.id, disabled.id, disabled=True)
    await world.authenticator.note_uses()
    assert last_used_at_ns() == {world.key.key.id: world.clock.now_ns, disabled.id: None}


async def test_uses_that_can_not_be_written_are_written_next_time(world: World) -> None:
    await world.authenticator.authenticate(world.key.text)
    used_at_ns = world.clock.now_ns
    world.database.broken = True
    with pytest.raises(TenancyUnavailable):
        await world.authenticator.note_uses()
    world.database.broken = False
    await world.authenticator.note_uses()
    (key,) = provisioning.list_keys(world.database, world.account.id)
    assert key.last_used_at_ns == used_at_ns


async def test_a_look_up_is_one_short_read(world: World) -> None:
    statements: list[str] = []

    @event.listens_for(world.database.engine, "before_cursor_execute")
    def record(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        assert threading.current_thread().name.startswith("database")
        statements.append(statement)

    await world.authenticator.authenticate(world.key.text)
    assert {statement.split()[0] for statement in statements} <= {"BEGIN", "SELECT"}
    assert [statement.split()[0] for statement in statements].count("SELECT") == 3
