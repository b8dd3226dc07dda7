"""Four gateway processes before one small real engine, by its own books: a burst, reports that freeze, a death.

The engine keeps a pace, so that one stream outlasts it all.
"""

import asyncio
import itertools
import re
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import orjson
import pytest

from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process
from tests.e2e.relay import Relay, relaying
from tests.engines import build_tiny_checkpoint, start_local_engine
from tests.stores import ValkeyServer

POOL_TOKENS = 4_096
TOKEN_BYTES = 2 * 2 * 2 * 16 * 2  # keys and values of two layers with two heads each, in bfloat16
STEP_MS = 30.0
LEASE_S = 3.0
LEASES_MIN = 5
FROZEN_S = 5.0
# Four processes, an engine and all their clients on a machine that does other things.
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Size:
    """words: of the prompt, five tokens each. tokens: of the answer."""

    words: int
    tokens: int


LONG = Size(1, 1_200)  # it lasts 36 s at the least
SMALL = Size(20, 40)
LARGE = Size(300, 400)  # two of these do not fit
BURST = 8  # at each gateway; together they do not fit
# More small ones than can be inside at once: who begins after so many others begins on a report that knew none of them.
FULL_ENGINE = 30


@dataclass
class Shared:
    """The gateways call the engine through the relay, we ask it for ourselves."""

    gateways: list[ServeProcess]
    engine_url: str
    relay: Relay
    session: aiohttp.ClientSession
    began: int = 0
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def load(self, name: str) -> int:
        """By the engine's own report."""
        report = orjson.loads(await asyncio.to_thread(_text, self.engine_url + "/v1/loads"))
        return int(report["loads"][0][name])

    async def engine_total(self, name: str) -> float:
        return _sum(await asyncio.to_thread(_text, self.engine_url + "/metrics"), name)

    async def stream(self, gateway: ServeProcess, size: Size) -> AsyncGenerator[bytes]:
        """As it comes. A refusal, or an answer that breaks off, fails the test. No two prompts begin alike."""
        body = {
            "model": "@cf/huggingfacetb/smollm2-135m-instruct",
            "messages": [{"role": "user", "content": f"{next(self.numbers)}: " + "hello " * size.words}],
            "max_tokens": size.tokens,
            "temperature": 0,  # so that it does not end by itself
            "stream": True,
        }
        headers = {"authorization": f"Bearer {gateway.bootstrap()['api_key']}"}
        part = b""
        url = f"{gateway.base_url}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for part in response.content.iter_any():
                yield part
        assert part.endswith(b"data: [DONE]\n\n"), part[-300:]

    async def ask(self, gateway: ServeProcess) -> None:
        """A small one, to its end."""
        first = True
        async for _ in self.stream(gateway, SMALL):
            self.began, first = self.began + first, False


@dataclass
class Reading:
    """Of a stream, part by part."""

    parts: int = 0

    async def read(self, stream: AsyncIterator[bytes]) -> None:
        async for _ in stream:
            self.parts += 1

    async def goes_on(self) -> None:
        parts = self.parts
        await eventually(lambda: self.parts > parts, within_s=PATIENCE_S, what="a stream that goes on")


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    checkpoint = build_tiny_checkpoint(tmp_path / "tiny", torch_dtype="bfloat16")
    async with AsyncExitStack() as stack:
        board = stack.enter_context(ValkeyServer())
        flags = {"step_ms": STEP_MS, "kv_cache_bytes": POOL_TOKENS * TOKEN_BYTES, "max_running_requests": 128}
        engine = stack.enter_context(
            start_local_engine(checkpoint, module="tests.backends.local.paced_server", **flags)
        )
        relay = stack.enter_context(relaying(engine.url))
        variables = {
            "PAGEGATE_ENGINE__URL": relay.url,
            "PAGEGATE_PAGES_URL": board.url,
            "PAGEGATE_GATEWAY__PAGES_LEASE_S": str(LEASE_S),
            "PAGEGATE_GATEWAY__PAGES_TIMEOUT_S": str(PATIENCE_S),  # the board is never away
            "PAGEGATE_GATEWAY__QUEUE_WAIT_SECONDS_MAX": "600",
            "PAGEGATE_TENANCY__METERS_PROCESSES": "4",
        }
        gateways = [stack.enter_context(serve_process(tmp_path / name, checkpoint, **variables)) for name in "abcd"]
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        bounds = aiohttp.ClientTimeout(total=None)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=bounds))
        for gateway in gateways:
            await eventually_async(partial(_ready, gateway), within_s=2 * START_S_MAX, what="a ready gateway")
        yield Shared(gateways, engine.url, relay, session)


@pytest.mark.engine
@pytest.mark.stores
@pytest.mark.load
@pytest.mark.timeout(600)
async def test_an_engine_behind_four_gateways_is_never_too_full_and_never_stands_still(shared: Shared) -> None:
    long = Reading()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(long.read(shared.stream(shared.gateways[0], LONG)), name="the long stream")
        await long.goes_on()
        began_at = time.monotonic()
        await a_burst_shares_its_pages(shared)
        await frozen_reports_stop_nobody(shared)
        await a_killed_gateways_pages_come_back(shared)
        await eventually(lambda: time.monotonic() > began_at + LEASES_MIN * LEASE_S)
        parts = long.parts
        await eventually(
            lambda: running.done() or long.parts > parts, within_s=PATIENCE_S, what="a stream that goes on"
        )
        running.cancel()
    assert await shared.engine_total("sglang:num_retracted_requests_total") == 0


async def a_burst_shares_its_pages(shared: Shared) -> None:
    used = [0]

    async def watch() -> None:
        while True:
            used.append(await shared.load("num_used_tokens"))
            await asyncio.sleep(STEP_MS / 1000)

    watching = asyncio.create_task(watch(), name="what is in use")
    try:
        await asyncio.gather(*(shared.ask(gateway) for gateway in shared.gateways for _ in range(BURST)))
    finally:
        watching.cancel()
    assert max(used) > POOL_TOKENS // 4  # they did not go one by one


async def frozen_reports_stop_nobody(shared: Shared) -> None:
    stop = asyncio.Event()

    async def client(gateway: ServeProcess) -> None:
        while not stop.is_set():
            await shared.ask(gateway)

    async with asyncio.TaskGroup() as clients:
        for gateway in shared.gateways:
            for _ in range(BURST):
                clients.create_task(client(gateway), name="a client")
        await eventually_async(partial(_is_full, shared), within_s=PATIENCE_S, what="a full engine")
        shared.relay.frozen, frozen_at, began = True, time.monotonic(), shared.began
        await eventually(
            lambda: time.monotonic() > frozen_at + FROZEN_S and shared.began > began + FULL_ENGINE,
            within_s=PATIENCE_S,
            what="requests that begin while reports are frozen",
        )
        assert shared.relay.repeated > 0
        shared.relay.frozen = False
        stop.set()


async def a_killed_gateways_pages_come_back(shared: Shared) -> None:
    victim, heir, lost = shared.gateways.pop(), shared.gateways[1], Reading()
    losing = asyncio.create_task(lost.read(shared.stream(victim, LARGE)), name="a stream that is lost")
    await lost.goes_on()
    victim.kill()
    with pytest.raises((aiohttp.ClientError, OSError)):
        await losing
    async with aclosing(shared.stream(heir, LARGE)) as stream:  # it needs what the dead one held
        async with asyncio.timeout(PATIENCE_S):
            await anext(stream)
    await eventually(
        lambda: any("a gateway has died" in gateway.log for gateway in shared.gateways), within_s=PATIENCE_S
    )


async def _is_full(shared: Shared) -> bool:
    return await shared.load("num_used_tokens") > POOL_TOKENS // 3


async def _ready(process: ServeProcess) -> bool:
    return await asyncio.to_thread(process.is_ready)


def _text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read(), "utf-8")


def _sum(metrics: str, name: str) -> float:
    found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return sum(map(float, found))
