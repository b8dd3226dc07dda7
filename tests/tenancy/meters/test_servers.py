"""Meters on a real cluster and behind a real sentinel: limits hold, and a lost node or a failover is survived."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.crc import key_slot

from tenancy.claims import Meter
from tenancy.errors import QuotaExceeded
from tenancy.meters.protocol import Reservation, Ticket
from tenancy.meters.redis import RedisMeters
from tenancy.meters.servers import listen, open_listener, open_servers
from tenancy.principal import Principal
from tenancy.quotas import Amounts, Quota
from tests.doubles.waiting import eventually, eventually_async
from tests.stores import ValkeyServer, valkey_cluster, valkey_with_sentinel

# Three times what is promised, for a machine that does ten things at once.
RECOVERY_S_MAX = 15.0
# A server that is well may take its time on a busy machine; one that hangs is waited for in vain.
PATIENT_S, BRIEF_S = 10.0, 0.5


@asynccontextmanager
async def running(url: str, *, timeout_s: float = PATIENT_S) -> AsyncIterator[RedisMeters]:
    meters = RedisMeters(url, processes=2, probe_interval_s=0.05, timeout_s=timeout_s)
    await meters.open()
    loop = asyncio.create_task(meters.run(), name="meters")
    try:
        yield meters
    finally:
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop
        await meters.close()


def account(number: int, limit: int) -> Principal:
    quotas = (Quota(Meter.REQUESTS_PER_MINUTE, limit),)
    return Principal(f"{number:032x}", "k", frozenset(), 1_000, None, quotas=quotas)


async def passed(meters: RedisMeters, who: Principal, count: int, prefix: str) -> list[Ticket]:
    asked = (
        meters.reserve(who, Reservation(f"{who.account_id}-{prefix}{number}", "m", Amounts()))
        for number in range(count)
    )
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(result, Ticket | QuotaExceeded) for result in results), results
    return [result for result in results if isinstance(result, Ticket)]


@pytest.mark.stores
async def test_accounts_lie_on_all_nodes_of_a_cluster_and_each_limit_holds() -> None:
    with valkey_cluster() as cluster:
        url = cluster.url
        accounts = [account(number, 10) for number in range(12)]
        nodes = {key_slot(b"pagegate:{%b}" % who.account_id.encode()) // 5_462 for who in accounts}
        assert nodes == {0, 1, 2}
        async with running(url) as one, running(url) as other:
            for who in accounts:
                first, second = await asyncio.gather(passed(one, who, 15, "a"), passed(other, who, 15, "b"))
                assert len(first) + len(second) == 10
                await asyncio.gather(*(one.settle(ticket, Amounts()) for ticket in first))
            assert not one.degraded

            # One node forgets everything, its functions too: its accounts begin anew, nobody notices.
            lost = cluster.nodes[2]
            lost.ask("FLUSHALL")
            lost.ask("FUNCTION", "FLUSH", "SYNC")
            again = [len(await passed(one, who, 15, "c")) for who in accounts]
            assert set(again) == {0, 10}
            assert not one.degraded

        # One node hangs: limits are tighter, never open, and shared again when it is back.
        async with running(url, timeout_s=BRIEF_S) as meters:
            lost.hang()
            fresh = account(99, 10)

            async def is_degraded() -> bool:
                await asyncio.gather(*(passed(meters, who, 1, f"d{time.monotonic()}") for who in accounts))
                return meters.degraded

            await eventually_async(is_degraded, what="a node that is missed")
            assert len(await passed(meters, fresh, 15, "e")) == 5
            lost.wake()
            await eventually(lambda: not meters.degraded, within_s=RECOVERY_S_MAX, what="recovery")


@pytest.mark.stores
async def test_after_a_failover_limits_are_shared_at_the_new_primary() -> None:
    with valkey_with_sentinel() as nodes:
        primary, replica, sentinel = nodes.nodes
        url = f"redis+sentinel://{sentinel.address}/limits"
        who = account(1, 100)
        async with running(url, timeout_s=BRIEF_S) as meters:
            (before,) = await passed(meters, who, 1, "before")
            primary.kill()
            (during,) = await passed(meters, who, 1, "during")
            assert meters.degraded
            await eventually(lambda: not meters.degraded, within_s=15, what="a new primary")
            for ticket in (before, during):
                await meters.settle(ticket, Amounts())
            assert len(await passed(meters, who, 3, "after")) == 3
            assert replica.ask("ROLE")[0] == "master"


@pytest.mark.parametrize(
    ("url", "why"),
    [("redis+sentinel://h:26379", "no name of a primary"), ("redis+cluster://,h", "names no host")],
)
def test_a_url_that_names_too_little_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_servers(url, timeout_s=1)


@pytest.mark.stores
async def test_whoever_listens_at_one_node_of_a_cluster_hears_what_is_published_at_another() -> None:
    with valkey_cluster() as cluster:
        async with (
            open_listener("redis+cluster://" + cluster.nodes[0].address) as client,
            client.pubsub(ignore_subscribe_messages=True) as pubsub,
        ):
            await pubsub.subscribe("freed")
            await pubsub.get_message(timeout=1)
            cluster.nodes[2].ask("PUBLISH", "freed", "a")

            async def heard() -> bool:
                return await pubsub.get_message(timeout=0.1) is not None

            await eventually_async(heard, what="the message")


@pytest.mark.stores
async def test_a_channel_that_is_wanted_later_is_listened_to(valkey: ValkeyServer) -> None:
    channels: list[str] = []
    heard = asyncio.Event()
    listening = asyncio.create_task(listen(valkey.url, lambda: channels, heard.set), name="listen")
    async with open_listener(valkey.url) as client:
        for channel in ("first", "brought by a deployment"):
            channels.append(channel)
            heard.clear()

            async def told(channel: str = channel) -> bool:
                await client.publish(channel, "")
                return heard.is_set()

            await eventually_async(told, within_s=20, what="a message")
    listening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await listening
