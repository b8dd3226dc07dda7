"""Both implementations of the meters behind one clock, for the suites that run over both."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tenancy.meters.process import ProcessMeters
from tenancy.meters.protocol import Meters, Reservation
from tenancy.meters.redis import RedisMeters
from tenancy.principal import Principal
from tenancy.quotas import Amounts, Quota
from tests.stores import ValkeyServer

# A moment in the middle of a 5-second bucket, a minute and a day.
START_MS = 1_800_000_012_500

_accounts = itertools.count(1)


class Clock:
    """Milliseconds, standing still until a test moves them."""

    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


def principal(*quotas: Quota, concurrency: int | None = None, **changes: Any) -> Principal:
    """A principal of an account that no other test uses."""
    values: dict[str, Any] = {"account_id": f"{next(_accounts):032x}", "key_id": "key-1"} | changes
    return Principal(
        scopes=frozenset(), concurrency=concurrency, credit_limit_nano=None, quotas=tuple(quotas), **values
    )


def wants(request_id: str, *, model: str = "m", **amounts: int) -> Reservation:
    return Reservation(request_id, model, Amounts(**amounts))


Make = Callable[[Clock], Awaitable[Meters]]


@pytest.fixture(params=["process", "valkey"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes meters of the parameter's kind on a clock."""
    async with AsyncExitStack() as stack:

        async def process(clock: Clock) -> Meters:
            return ProcessMeters(clock_ms=clock)

        async def shared(clock: Clock) -> Meters:
            server: ValkeyServer = request.getfixturevalue("valkey")
            meters = RedisMeters(server.url, clock_ms=clock, timeout_s=5, lease_s=600)
            stack.push_async_callback(meters.close)
            await meters.open()
            return meters

        yield process if request.param == "process" else shared


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def meters(make: Make, clock: Clock) -> Meters:
    return await make(clock)


async def all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """What each call returned or raised."""
    return list(await asyncio.gather(*calls, return_exceptions=True))
