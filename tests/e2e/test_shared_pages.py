"""Several gateways before one small engine: it is never over-full, and reports may freeze.

With real processes, of which one is killed, before a real engine: test_shared_engine.py.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service
from tests.stores import ValkeyServer

POOL_TOKENS = 2_048
# Here all gateways live in one busy process: nobody is to be taken for dead, nor the board for away: alone, each would
# go by a share.
LONG_S = 30.0


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
        gateway = {"pages_lease_s": LONG_S, "pages_timeout_s": LONG_S}
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

    async def three_have_heard() -> bool:
        figures = await _figures(four)
        return sum("pagegate_engine_reports_heard_total 0.0" not in figure for figure in figures) == 3

    await eventually_async(three_have_heard, what="reports that were heard of")
    figures = await _figures(four)
    assert not running.done(), "what follows is said of requests that run"
    assert not any(re.search(r"^pagegate_ghost_requests{.*} [1-9]", figure, re.MULTILINE) for figure in figures)
    assert await running == [200] * 4


async def _figures(services: list[Service]) -> list[str]:
    return [(await service.send("GET", "/metrics", key=None)).body.decode() for service in services]
