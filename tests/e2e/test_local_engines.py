"""The gateway over real local engines, alone and as a pair: clients leave, halves die, and nothing stays behind."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually_async
from tests.e2e.deployments import model, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.local_service import running_local_service
from tests.e2e.service import Service, running_service
from tests.engines import LocalEngine, free_port, start_local_engine

pytestmark = pytest.mark.engine
WORDS = "the pages are the scarce thing, so the gate is driven by pages. " * 6


async def is_idle(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/v1/loads") as response:
        rank = orjson.loads(await response.read())["loads"][0]
    queues = [rank[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")]
    return not any(queues) and not any(
        rank["disaggregation"][f"{name}_queue_reqs"]
        for name in ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")
    )


async def test_two_hundred_streams_that_are_left_anywhere_leave_no_request_in_the_engine(
    tmp_path: Path, checkpoint: Path
) -> None:
    drawn = random.Random(4)
    async with running_local_service(tmp_path / "home", checkpoint, kv_cache_bytes=32 << 20) as service:

        async def leave(events: int) -> None:
            body = CHAT.body(service, max_tokens=1500, temperature=0, stream=True)
            async with service.open_stream(CHAT.path(service), body) as response:
                assert response.status == 200
                for _ in range(events):
                    await response.content.readuntil(b"\n\n")

        for _ in range(10):
            await asyncio.gather(*(leave(drawn.randrange(6)) for _ in range(20)))
        await service.oracle(rows=200)
        await eventually_async(lambda: is_idle(service.session, service.engine.url), what="an idle engine")
        assert {row["outcome"] for row in await service.records()} == {"client_disconnected"}


@dataclass(frozen=True)
class LocalPair:
    service: Service
    prefill: LocalEngine
    decode: LocalEngine

    async def ask(self, **fields: Any) -> dict[str, Any]:
        answer = await self.service.post(CHAT.path(self.service), CHAT.body(self.service, **fields))
        assert answer.status == 200, answer.body
        return answer.json()

    async def comes_to_rest(self, *urls: str) -> None:
        for url in urls or (self.prefill.url, self.decode.url):
            await eventually_async(lambda url=url: is_idle(self.service.session, url), what=f"an idle {url}")  # type: ignore[misc]  # the loop's value


@dataclass(frozen=True)
class _Decode:
    url: str
    live: tuple[str, ...] = ()


@contextlib.asynccontextmanager
async def running_pair(tmp_path: Path, checkpoint: Path) -> AsyncIterator[LocalPair]:
    port = free_port()
    flags: dict[str, Any] = {"kv_cache_dtype": "bf16", "kv_cache_bytes": 8 << 20}
    weights = {"checkpoint": "/weights", "precision": "bf16"}
    with (
        start_local_engine(checkpoint, role="prefill", disaggregation_bootstrap_port=port, **flags) as prefill,
        start_local_engine(checkpoint, role="decode", **flags) as decode,
    ):
        pair = {
            "name": "p",
            "bootstrap_port": port,
            "prefill": {"url": prefill.url, "weights": weights},
            "decode": {"url": decode.url, "weights": weights},
        }
        deployed = model(checkpoint, page_tags=True) | {"pairs": [pair]}
        file = write_deployment(tmp_path / "deployment.toml", deployed)
        double = cast("ScriptedEngine", _Decode(decode.url))
        # What a dead half leaves waiting is not waited for.
        waits = {"queue_wait_seconds_max": 2.0}
        async with running_service(tmp_path / "home", checkpoint, double, deployment=file, gateway=waits) as service:
            yield LocalPair(service, prefill, decode)


@pytest.fixture
async def pair(tmp_path: Path, checkpoint: Path) -> AsyncIterator[LocalPair]:
    async with running_pair(tmp_path, checkpoint) as pair:
        yield pair


async def test_a_pair_answers_as_one_bills_prefill_s_cached_tokens_and_survives_clients_that_leave(
    pair: LocalPair,
) -> None:
    service = pair.service
    asked = {"messages": [{"role": "user", "content": WORDS}], "temperature": 0, "max_tokens": 12}
    first, second = await pair.ask(**asked), await pair.ask(**asked)
    assert first["choices"] == second["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, (first["usage"]["prompt_tokens"] - 1) // 16 * 16]
    assert (await service.record(second["id"]))["cached_tokens"] == cached[1]
    streamed = await service.post(CHAT.path(service), CHAT.body(service, **asked, stream=True))
    assert CHAT.said(streamed.events()) == first["choices"][0]["message"]["content"]

    async def leave(at: int) -> None:
        body = CHAT.body(service, **asked | {"max_tokens": 600, "stream": True, "messages": [
            {"role": "user", "content": f"{at} {WORDS}"}]})  # fmt: skip
        async with service.open_stream(CHAT.path(service), body) as response:
            for _ in range(at % 4):
                await response.content.readuntil(b"\n\n")

    await asyncio.gather(*(leave(at) for at in range(12)))
    await service.oracle(rows=15)
    await pair.comes_to_rest()


async def test_a_decode_that_dies_in_mid_stream_ends_it_with_an_error_and_nobody_pays(pair: LocalPair) -> None:
    service = pair.service
    body = CHAT.body(service, stream=True, max_tokens=1500, temperature=0)
    async with service.open_stream(CHAT.path(service), body) as response:
        seen = b""
        while seen.count(b"data: ") < 5:
            seen += await response.content.readany()
        pair.decode.process.kill()
        seen += await response.content.read()
    assert b'"error"' in seen
    assert b"[DONE]" not in seen
    await service.oracle(rows=1)
    [row] = await service.records()
    assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)
    await pair.comes_to_rest(pair.prefill.url)


async def test_a_prefill_that_dies_leaves_the_streams_that_have_their_pages_and_fails_the_next_request(
    pair: LocalPair,
) -> None:
    service = pair.service
    body = CHAT.body(service, stream=True, max_tokens=300, temperature=0)
    async with service.open_stream(CHAT.path(service), body) as response:
        await response.content.readuntil(b"\n\n")
        await response.content.readuntil(b"\n\n")
        pair.prefill.process.kill()
        rest = await response.content.read()
    assert b"[DONE]" in rest
    failed = await service.post(CHAT.path(service), CHAT.body(service, max_tokens=5))
    assert failed.status >= 500
    await eventually_async(lambda: is_idle(service.session, pair.decode.url), what="an idle decode half")
    await service.oracle(rows=2)
    outcomes = [row["outcome"] for row in await service.records()]
    assert outcomes.count("finished") == 1
