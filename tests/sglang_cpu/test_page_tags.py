"""The page-tag plugin in real SGLang: near-identical prompts in crowds are left alone, a foreign page is not."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import orjson
import pytest

from backends.page_tags import ABORT_MESSAGE
from backends.sglang.attach import contradictions
from backends.sglang.probe import read_reports
from tests.engines import build_tiny_checkpoint
from tests.sglang_cpu.server import FAULTY_RID, TEST_S_MAX, SglangServer, start_sglang

# For each size of pages: 5,000 in all.
REQUESTS = 2500
# Crowds of thousands take minutes on a busy machine.
pytestmark = [pytest.mark.sglang, pytest.mark.load, pytest.mark.timeout(2 * TEST_S_MAX)]


@pytest.fixture(scope="module", params=[1, 64], ids=lambda tokens: f"pages-of-{tokens}")
def sglang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """Pages of 16 are what the other tests' servers have."""
    checkpoint = build_tiny_checkpoint(tmp_path_factory.mktemp("tags") / "tiny")
    with start_sglang(checkpoint, page_tokens=request.param) as server:
        yield server


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


def body(prompt: list[int], *, tokens: int, rid: str | None = None, stream: bool = False) -> dict[str, Any]:
    return {
        "model": "contract",
        "messages": [{"role": "user", "content": "ignored"}],
        "input_ids": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "rid": rid or secrets.token_hex(18),
        "stream": stream,
    }


async def post(server: SglangServer, session: aiohttp.ClientSession, fields: dict[str, Any]) -> tuple[int, bytes]:
    async with session.post(server.url + "/v1/chat/completions", json=fields) as response:
        return response.status, await response.read()


async def text(server: SglangServer, session: aiohttp.ClientSession, fields: dict[str, Any]) -> str:
    status, answer = await post(server, session, fields)
    assert status == 200, answer
    content = orjson.loads(answer)["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


async def test_crowds_with_near_identical_prompts_are_left_alone(
    sglang: SglangServer, session: aiohttp.ClientSession
) -> None:
    """Shared, cut and extended prompts; streams that are left; a pool that must evict."""
    drawn = random.Random(7)
    stems = [[drawn.randrange(3, 384) for _ in range(length)] for length in (17, 64, 130, 400, 700)]
    at_once = asyncio.Semaphore(24)

    async def one() -> None:
        stem = drawn.choice(stems)
        cut = drawn.choice([len(stem), drawn.randrange(1, len(stem))])
        prompt = stem[:cut] + [drawn.randrange(3, 384) for _ in range(drawn.choice([0, 1, 3, 20]))]
        fields = body(prompt, tokens=drawn.choice([1, 1, 2, 3, 17]), stream=drawn.random() < 0.2)
        async with at_once:
            if fields["stream"] and drawn.random() < 0.5:
                async with session.post(sglang.url + "/v1/chat/completions", json=fields) as response:
                    await response.content.readany()
                    response.close()
                return
            status, answer = await post(sglang, session, fields)
            assert status == 200, answer
            assert b'"abort"' not in answer

    async with asyncio.TaskGroup() as group:
        for number in range(REQUESTS):
            group.create_task(one(), name=f"request {number}")
    reports = await read_reports(sglang.url, within_s=60)
    assert contradictions(sglang.model, "unified", sglang.model.replicas[0], reports) == []
    assert "pagegate:page_tags_requests_aborted_total 0.0" in reports.metrics
    said = reports.server_info["internal_states"][0]["page_tags"]
    assert said["active"] is True
    assert said["requests_aborted"] == said["pages_quarantined"] == 0
    assert said["pairs_checked"] > REQUESTS


async def test_a_page_freed_under_a_request_stops_it_alone_before_its_token_leaves(
    sglang: SglangServer, session: aiohttp.ClientSession
) -> None:
    prompts = [[*range(5, 60), 60 + number] for number in range(5)]
    clean = [await text(sglang, session, body(prompt, tokens=24)) for prompt in prompts]
    victim = body(prompts[0], tokens=24, rid=FAULTY_RID + secrets.token_hex(15))
    streamed = body(prompts[1], tokens=24, rid=FAULTY_RID + secrets.token_hex(15), stream=True)
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(text(sglang, session, body(prompt, tokens=24)), name="other") for prompt in prompts]
        stopped = group.create_task(post(sglang, session, victim), name="victim")
        cut_off = group.create_task(post(sglang, session, streamed), name="streamed victim")
    assert [other.result() for other in others] == clean
    assert stopped.result()[0] == 500
    assert b"changed hands" in stopped.result()[1]
    seen = delivered(cut_off.result()[1])
    assert clean[1].startswith(seen)
    assert len(seen) < len(clean[1])
    assert ABORT_MESSAGE.encode() in cut_off.result()[1]
    assert b'"finish_reason":"' not in cut_off.result()[1]
    metrics = (await read_reports(sglang.url, within_s=60)).metrics
    assert "pagegate:page_tags_requests_aborted_total 2.0" in metrics
    assert "pagegate:page_tags_pages_quarantined 2.0" in metrics
    # The server goes on, its pool two pages smaller.
    assert await text(sglang, session, body(prompts[0], tokens=24)) == clean[0]


def delivered(stream: bytes) -> str:
    """The text that a client of this stream has seen."""
    events = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in orjson.loads(event).get("choices", ())
    )
