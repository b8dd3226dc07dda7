"""Several gateways before one small engine: it is never over-full, reports may freeze, and the dead leave nothing."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT
from tests.e2e.process import ServeProcess, serve_process
from tests.e2e.service import Service, running_service
from tests.stores import ValkeyServer

POOL_TOKENS = 2_048
# Here all gateways live in one busy process: nobody is to be taken for dead.
LONG_LEASE_S = 30.0
LEASE_S = 2.0


@pytest.fixture
def board() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(pool_tokens=POOL_TOKENS) as engine:
        yield engine


@pytest.fixture
async def four(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, board: ValkeyServer
) -> AsyncIterator[list[Service]]:
    async with contextlib.AsyncExitStack() as stack:
        gateway = {"pages_lease_s": LONG_LEASE_S}
        yield [
            await stack.enter_async_context(
                running_service(tmp_path / name, checkpoint, engine, pages_url=board.url, gateway=gateway)
            )
            for name in ("one", "two", "three", "four")
        ]


async def burst(services: list[Service], count: int, *, max_tokens: int) -> list[int]:
    """So many at once at each; their statuses."""

    async def ask(service: Service) -> int:
        return (await service.post(CHAT.path(service), CHAT.body(service, max_tokens=max_tokens))).status

    return await asyncio.gather(*(ask(service) for service in services for _ in range(count)))


@pytest.mark.stores
async def test_a_burst_at_four_gateways_never_overfills_the_engine(four: list[Service], engine: ScriptedEngine) -> None:
    engine.steer(itl_ms=1)
    assert set(await burst(four, 12, max_tokens=150)) == {200}
    assert engine.peak_used_tokens <= POOL_TOKENS
    assert engine.peak_used_tokens >= POOL_TOKENS // 4  # and it did not go one by one


@pytest.mark.stores
async def test_frozen_reports_neither_overfill_it_nor_stop_the_service(
    four: list[Service], engine: ScriptedEngine
) -> None:
    engine.steer(itl_ms=1, loads="stale")
    async with asyncio.timeout(60):
        for _ in range(2):
            assert set(await burst(four, 8, max_tokens=150)) == {200}
    assert engine.peak_used_tokens <= POOL_TOKENS


@pytest.mark.stores
@pytest.mark.load
async def test_an_engine_is_asked_by_one_gateway_for_all_and_its_work_is_nobodys_ghost(
    four: list[Service], engine: ScriptedEngine
) -> None:
    engine.steer(itl_ms=30)
    running = asyncio.create_task(burst(four, 1, max_tokens=200), name="a request at each")
    await eventually(lambda: len(engine.live) == 4, within_s=30, what="a request at each")
    began, polls = time.monotonic(), engine.polls
    await eventually(lambda: engine.polls >= polls + 30, within_s=30, what="polls")
    # Each by itself would ask every 200 ms.
    assert engine.polls - polls < 0.75 * 5 * len(four) * (time.monotonic() - began)
    figures = [(await service.send("GET", "/metrics", key=None)).body.decode() for service in four]
    assert not running.done(), "what follows is said of requests that run"
    assert sum("pagegate_engine_reports_heard_total 0.0" not in figure for figure in figures) == 3
    assert not any(re.search(r"^pagegate_ghost_requests{.*} [1-9]", figure, re.MULTILINE) for figure in figures)
    assert await running == [200] * 4


@pytest.mark.stores
@pytest.mark.load
async def test_a_killed_gateways_pages_come_back_within_its_lease_and_a_long_stream_keeps_its_own(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, board: ValkeyServer
) -> None:
    variables = {
        "PAGEGATE_ENGINE__URL": engine.url,
        "PAGEGATE_PAGES_URL": board.url,
        "PAGEGATE_GATEWAY__PAGES_LEASE_S": str(LEASE_S),
    }
    engine.steer(itl_ms=25)
    with (
        serve_process(tmp_path / "dies", checkpoint, **variables) as dies,
        serve_process(tmp_path / "lives", checkpoint, **variables) as lives,
    ):
        for process in (dies, lives):
            await eventually_async(partial(_ready, process), within_s=90, what="a ready gateway")
        async with _client() as session:
            stream = asyncio.create_task(_stream(session, lives, max_tokens=400), name="the long stream")
            await eventually(lambda: len(engine.live) == 1, what="a stream that runs")
            lost = asyncio.create_task(_stream(session, dies, max_tokens=900), name="a stream that is lost")
            await eventually(lambda: len(engine.live) == 2, what="two streams that run")
            dies.kill()
            await asyncio.gather(lost, return_exceptions=True)
            # It needs what the dead one held.
            async with asyncio.timeout(LEASE_S + 10):
                assert await _stream(session, lives, max_tokens=900, to_its_end=False) == 200
            assert await stream == 200
    assert engine.peak_used_tokens <= POOL_TOKENS


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def _ready(process: ServeProcess) -> bool:
    return await asyncio.to_thread(process.is_ready)


async def _stream(
    session: aiohttp.ClientSession, process: ServeProcess, *, max_tokens: int, to_its_end: bool = True
) -> int:
    """The status, once it has begun or ended."""
    known = process.bootstrap()
    body = {
        "model": "@cf/huggingfacetb/smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": max_tokens,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {known['api_key']}"}
    async with session.post(f"{process.base_url}/v1/chat/completions", json=body, headers=headers) as response:
        await (response.read() if to_its_end else response.content.readany())
        return response.status
