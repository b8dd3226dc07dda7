"""The real SGLang as a prefill/decode pair on the CPU: the engine contract, then our gateway in front of it.

One pair for all of it. The tests stand in the order in which they hurt it: the last ones hang and kill its halves.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from backends.page_tags import ABORT_MESSAGE
from backends.sglang.attach import contradictions
from backends.sglang.probe import read_reports
from tests.backends import test_engine_contract as contract
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.service import Service, running_service
from tests.engines import build_tiny_checkpoint
from tests.sglang_cpu import crowds
from tests.sglang_cpu.server import FAULTY_RID, TEST_S_MAX, SglangPair, SglangServer, start_pair

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_S_MAX)]
SILENCE_S = 12.0
# With those of test_page_tags.py and test_real_sglang.py 5,000 in all.
CROWD = 500
STORM = 500
STORM_S_MAX = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("pair") / "tiny")


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[SglangPair]:
    with start_pair(checkpoint) as started:
        yield started


@pytest.fixture
async def engine(pair: SglangPair) -> AsyncIterator[contract.Pair]:
    """In place of the contract's own engines."""
    async with crowds.own_connections() as session:
        halves = contract.Pair(pair.decode.url, session, pair.prefill.url, pair.model.pairs[0].bootstrap)
        await eventually_async(halves.is_idle, within_s=20, what="an idle pair")
        yield halves


class TestAnswers(contract.TestAnswers):
    """The contract's, over the pair."""


class TestRefusals(contract.TestRefusals):
    """The contract's, over the pair."""


class TestStopping(contract.TestStopping):
    """The contract's, over the pair."""


class TestReports(contract.TestReports):
    """The contract's, over the pair."""


@pytest.fixture
async def service(tmp_path: Path, checkpoint: Path, pair: SglangPair) -> AsyncIterator[Service]:
    """The gateway, attached to the pair by a deployment file that promises what the pair was launched with."""
    file = tmp_path / "deployment.toml"
    file.write_text(attached(pair))
    nobody = ScriptedEngine()  # where a service of scripted engines has one: it is not even started
    options: dict[str, Any] = {
        "deployment": file,
        "backends": {"silence_s_max": SILENCE_S},
        "gateway": {"queue_entries_max": STORM, "queue_tenant_entries_max": STORM, "queue_wait_seconds_max": 10},
    }
    async with running_service(tmp_path / "home", checkpoint, nobody, **options) as service:
        yield service


def attached(pair: SglangPair) -> str:
    weights = f'{{ checkpoint = "{pair.model.tokenizer}", precision = "bf16" }}'
    return f"""
[[models]]
id = "pair"
price = "pair-price"
tokenizer = "{pair.model.tokenizer}"
limits = {{ context_tokens = 2048, output_tokens_max = 2047 }}
kv_cache_dtype = "fp8_e4m3"
page_tokens = 16
page_tags = true
[[models.pairs]]
name = "p"
transfer = "mooncake_tcp"
bootstrap_port = {pair.model.pairs[0].bootstrap_port}
prefill = {{ url = "{pair.prefill.url}", weights = {weights} }}
decode = {{ url = "{pair.decode.url}", weights = {weights} }}
"""


def client_of(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0, timeout=120)


def chat(service: Service, words: int = 30, **fields: Any) -> dict[str, Any]:
    text = " ".join(["the pages are the scarce thing"] * (words // 6))
    body = {"model": "pair", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16}
    return body | fields


async def idle(pair: SglangPair) -> bool:
    """Nothing runs, and no queue of the hand-over holds anybody."""
    async with aiohttp.ClientSession() as session:
        for half in (pair.prefill, pair.decode):
            async with session.get(half.url + "/v1/loads?include=core,disagg") as response:
                load = (await response.json())["loads"][0]
            queues = [count for name, count in load["disaggregation"].items() if name.endswith("_reqs")]
            if load["num_running_reqs"] or load["num_used_tokens"] or any(queues):
                return False
    return True


async def ended(service: Service, pair: SglangPair | None, *, rows: int) -> dict[str, Any]:
    if pair is not None:
        await eventually_async(lambda: idle(pair), within_s=20, what="an idle pair")
    await service.oracle(rows=rows)
    return (await service.records())[0]


async def test_the_halves_are_what_the_file_says(pair: SglangPair) -> None:
    for (_, role, half), server in zip(pair.model.engines(), (pair.prefill, pair.decode), strict=True):
        assert contradictions(pair.model, role, half, await read_reports(server.url, within_s=60)) == []


async def test_openais_client_streams_from_a_pair_and_the_second_answer_finds_its_prompt_cached(
    service: Service, pair: SglangPair
) -> None:
    async with client_of(service) as client:
        for number in (1, 2):
            stream = await client.chat.completions.create(
                **chat(service), stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            [usage] = [chunk.usage for chunk in chunks if chunk.usage]
            row = await ended(service, pair, rows=number)
            assert row["outcome"] == "finished"
            assert (row["prompt_tokens"], row["completion_tokens"]) == (usage.prompt_tokens, 16)
    # Prefill's count: decode keeps no prefixes.
    assert usage.prompt_tokens_details is not None
    assert row["cached_tokens"] == usage.prompt_tokens_details.cached_tokens == row["prompt_tokens"] // 16 * 16


async def test_a_pair_says_the_same_as_it_says_alone_after_hand_overs_were_aborted(
    service: Service, pair: SglangPair
) -> None:
    """Pages of aborted hand-overs are used again at once; a late write into them would change a greedy answer."""
    clean = [(await service.post("/v1/chat/completions", chat(service, 30 + 6 * n))).json() for n in range(4)]

    async def leave(number: int) -> None:
        try:
            async with asyncio.timeout(0.01 * (number % 7)):
                await service.post("/v1/chat/completions", chat(service, 600 + 6 * number, stream=True))
        except TimeoutError:
            return

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(leave(number), name="one that leaves")
        again = [
            group.create_task(service.post("/v1/chat/completions", chat(service, 30 + 6 * n)), name="one that stays")
            for n in range(4)
        ]
    said = [task.result().json()["choices"][0]["message"]["content"] for task in again]
    assert said == [answer["choices"][0]["message"]["content"] for answer in clean]
    await eventually_async(lambda: idle(pair), within_s=30, what="a pair whose queues have drained")
    await eventually_async(service.is_clean, within_s=20, what="a clean service")


@pytest.mark.load
async def test_a_storm_of_clients_that_leave_strands_nobody_in_any_queue(service: Service, pair: SglangPair) -> None:
    """Some leave while they wait here, some in each queue of the hand-over, some in mid-stream."""

    async def leave(number: int) -> None:
        await asyncio.sleep(0.01 * number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (number % 50)):
                await service.post("/v1/chat/completions", chat(service, 60 + number % 300, stream=True))

    async with asyncio.timeout(STORM_S_MAX):
        await asyncio.gather(*(leave(number) for number in range(STORM)))
        await eventually_async(lambda: idle(pair), within_s=60, what="a pair whose queues have drained")
        await eventually_async(service.is_clean, within_s=20, what="a clean service")
    assert (await service.post("/v1/chat/completions", chat(service))).status == 200


@pytest.mark.load
async def test_crowds_with_near_identical_prompts_are_left_alone_by_both_halves(
    engine: contract.Pair, pair: SglangPair
) -> None:
    await crowds.is_left_alone(engine, requests=CROWD)
    await eventually_async(lambda: idle(pair), within_s=60, what="a pair whose queues have drained")
    for half in (pair.prefill, pair.decode):
        said = await crowds.tags_say(half.url)
        assert said["requests_aborted"] == said["pages_quarantined"] == 0
        assert said["pairs_checked"] > CROWD


async def test_a_client_that_leaves_in_mid_stream_frees_both_halves_and_pays_for_what_it_got(
    service: Service, pair: SglangPair
) -> None:
    async with client_of(service) as client:
        stream = await client.chat.completions.create(**chat(service, max_tokens=1800), stream=True)
        chunks = aiter(stream)
        for _ in range(4):
            await anext(chunks)
        await stream.close()
    row = await ended(service, pair, rows=1)
    assert row["outcome"] == "client_disconnected"
    assert 0 < row["completion_tokens"] < 1800
    assert row["cost_nano"] > 0


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_half_that_hangs_fails_the_request_after_the_bound_and_serves_again_when_it_goes_on(
    service: Service, pair: SglangPair, half: str
) -> None:
    hung = getattr(pair, half)
    hung.signal(signal.SIGSTOP)
    try:
        answer = await service.post("/v1/chat/completions", chat(service, 60))
        assert answer.status >= 500
    finally:
        hung.signal(signal.SIGCONT)
    row = await ended(service, pair, rows=1)
    assert (row["outcome"], row["cost_nano"], row["completion_tokens"]) == ("upstream_failed", 0, 0)
    await eventually_async(lambda: _up(service), within_s=30, what="a pair that is used again")
    assert (await service.post("/v1/chat/completions", chat(service, 60))).status == 200


async def _up(service: Service) -> bool:
    return (await service.send("GET", "/health/ready")).status == 200


# Behind those that wait for an idle pair: pages that are kept out of circulation count as used.
async def test_a_page_lost_in_either_half_stops_that_request_alone(engine: contract.Pair, pair: SglangPair) -> None:
    path = contract.PATHS[0]
    prompts = [[*contract.PROMPT, *range(5, 40), 40 + number] for number in range(4)]

    async def text(prompt: list[int]) -> str:
        status, answer = await engine.post(path, contract.call(path, input_ids=prompt, max_tokens=24))
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    before = await _stopped(pair)
    assert before == (0, 0), "everybody so far held their own pages"
    clean = [await text(prompt) for prompt in prompts]
    for number, half in enumerate(("prefill", "decode")):
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(text(prompt), name="another") for prompt in prompts]
            stopped = group.create_task(_lose(engine, pair, half, prompts[0]), name="a victim")
        assert stopped.result() == (500, True)
        assert [other.result() for other in others] == clean
        assert await _stopped(pair) == (1, number)


async def _lose(engine: contract.Pair, pair: SglangPair, half: str, prompt: list[int]) -> tuple[int, bool]:
    """How the half answers that loses the request's page, and whether it says why; the other is told to stop."""
    rid = f"{FAULTY_RID}{half}-{'0' * 24}"
    host, port = engine.bootstrap
    body = contract.call(contract.PATHS[0], input_ids=prompt, max_tokens=24, rid=rid) | {
        "bootstrap_host": host,
        "bootstrap_port": port,
        "bootstrap_room": 1 + int(half == "decode"),
    }

    async def ask(server: SglangServer) -> tuple[int, bool]:
        async with engine.session.post(server.url + contract.PATHS[0], json=body) as response:
            return response.status, ABORT_MESSAGE in await response.text()

    asking = {name: asyncio.create_task(ask(getattr(pair, name)), name=name) for name in ("prefill", "decode")}
    answer = await asking[half]
    await engine.post("/abort_request", {"rid": rid})
    await asyncio.wait(asking.values())
    return answer


async def _stopped(pair: SglangPair) -> tuple[int, int]:
    """Requests that prefill and decode have stopped because of a foreign page."""
    counts = []
    for half in (pair.prefill, pair.decode):
        metrics = (await read_reports(half.url, within_s=60)).metrics
        lines = [line for line in metrics.splitlines() if line.startswith("pagegate:page_tags_requests_aborted_total")]
        counts.append(int(sum(float(line.rsplit(" ", 1)[1]) for line in lines)))
    return counts[0], counts[1]


async def test_prefill_killed_under_a_prompt_fails_that_one_and_decode_killed_in_mid_stream_the_other(
    service: Service, pair: SglangPair
) -> None:
    """Together, since a half takes a minute to start anew."""
    async with client_of(service) as client:
        stream = await client.chat.completions.create(**chat(service, max_tokens=1900), stream=True)
        chunks = aiter(stream)
        for _ in range(4):
            await anext(chunks)
        pair.prefill.signal(signal.SIGSTOP)
        prompt = asyncio.create_task(service.post("/v1/chat/completions", chat(service, 900)), name="a prompt")
        await eventually(lambda: len(service.services.holds.live) == 2, what="a second request")
        await eventually_async(lambda: _waits_in_decode(pair), within_s=20, what="a prompt that decode waits for")
        pair.prefill.kill()
        # The first one's prompt had been handed over: its stream goes on without prefill.
        for _ in range(4):
            await anext(chunks)
        pair.decode.kill()  # at once, before a tiny model is through with its context
        with pytest.raises(openai.APIError):
            [chunk async for chunk in chunks]
        # A half that can't be reached has seen nothing: another pair would have been asked.
        answer = await prompt
        assert (answer.status, "retry-after" in answer.headers) == (503, True)
    await service.oracle(rows=2)
    for row in await service.records():
        assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)


async def _waits_in_decode(pair: SglangPair) -> bool:
    async with (
        aiohttp.ClientSession() as session,
        session.get(pair.decode.url + "/v1/loads?include=core,disagg") as response,
    ):
        queues = (await response.json())["loads"][0]["disaggregation"]
    return bool(queues["decode_prealloc_queue_reqs"] or queues["decode_transfer_queue_reqs"])
