"""The real SGLang, started by `pagegate engine up`: the engine contract, then our gateway in front of it.

One server for all of it, with pages of 64. The tests stand in the order in which they hurt it: the last one kills it.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from backends.sglang.attach import contradictions
from backends.sglang.launch import engine_commands
from backends.sglang.probe import read_reports
from backends.topology import Deployment, Model, read_deployment
from tests.backends import test_engine_contract as contract
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import model, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.service import Answer, Service, running_service
from tests.engines import build_tiny_checkpoint
from tests.sglang_cpu import crowds, tool_calls
from tests.sglang_cpu.server import READY_S_MAX, TEST_S_MAX, SupervisedSglang, engine_up, sglang_python

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_S_MAX)]
SILENCE_S = 20.0
MODEL = "@cf/test/deployed"
EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
# With those of test_page_tags.py and test_real_pair.py 5,000 in all.
CROWD = 2250
# SGLang's own parser, without resolving anything (that would look for GPUs and checkpoints).
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for arguments in json.load(sys.stdin):
    parser.parse_args(arguments)
"""
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_checkpoint(tmp_path_factory.mktemp("sglang") / "tiny")


@pytest.fixture(scope="module")
def sglang(checkpoint: Path) -> Iterator[SupervisedSglang]:
    with engine_up(checkpoint, model_id=MODEL) as server:
        yield server


@pytest.fixture
async def engine(sglang: SupervisedSglang) -> AsyncIterator[contract.Engine]:
    """In place of the contract's own engines."""
    async with crowds.own_connections() as session:
        engine = contract.Engine(sglang.url, session)
        await eventually_async(engine.is_idle, within_s=20, what="an idle engine")
        yield engine


class TestAnswers(contract.TestAnswers):
    """The contract's, over SGLang."""


class TestRefusals(contract.TestRefusals):
    """The contract's, over SGLang."""


class TestStopping(contract.TestStopping):
    """The contract's, over SGLang."""


class TestMemory(contract.TestMemory):
    """On a CPU there is no memory saver: SGLang keeps its memory, forgets its cache and serves on."""


class TestReports(contract.TestReports):
    """The contract's, over SGLang."""


def test_sglangs_own_parser_takes_the_command_lines_of_the_examples() -> None:
    commands = [
        command
        for file in ("kimi-k2.6.toml", "glm-5.2.toml", "local.toml")
        for model in read_deployment(EXAMPLES / file).models
        for command in engine_commands(model)
    ]
    assert len(commands) == 3
    parsed = subprocess.run(
        [sglang_python(), "-W", "ignore", "-c", PARSE],
        input=json.dumps([command.argv[3:] for command in commands]),
        env={"PATH": os.defpath, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_S_MAX,
    )
    assert parsed.returncode == 0, parsed.stderr[-2000:]


async def test_a_server_is_what_the_file_says_that_it_was_launched_from(sglang: SupervisedSglang) -> None:
    reports = await read_reports(sglang.url, within_s=60)
    replica = sglang.model.replicas[0]
    assert contradictions(sglang.model, "unified", replica, reports) == []
    other = changed(sglang.model, kv_cache_dtype="bf16", page_tokens=16)
    assert [sentence.split()[0] for sentence in contradictions(other, "decode", replica, reports)] == [
        "--page-size",
        "--kv-cache-dtype",
        "--disaggregation-mode",
    ]


def changed(model: Model, **fields: Any) -> Model:
    return Deployment.model_validate({"models": [model.model_dump() | fields]}).models[0]


@pytest.fixture
async def service(tmp_path: Path, checkpoint: Path, sglang: SupervisedSglang) -> AsyncIterator[Service]:
    """A gateway that has asked the server whether it is what the file says: an FP8 cache, page tags."""
    weights = {"checkpoint": str(checkpoint), "precision": "bf16"}
    replica = {"url": sglang.url, "weights": weights, "reserved_output_tokens_max": 256}
    promised: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "page_tags": True, "page_tokens": 64}
    file = write_deployment(tmp_path / "d.toml", model(checkpoint, replicas=[replica], **promised))
    nobody = ScriptedEngine()  # where a service of scripted engines has one: it is not even started
    bounds = {"silence_s_max": SILENCE_S}
    async with running_service(tmp_path / "home", checkpoint, nobody, deployment=file, backends=bounds) as service:
        yield service


def client_of(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0, timeout=120)


async def ask(service: Service, **fields: Any) -> Answer:
    return await service.post(CHAT.path(service), CHAT.body(service, **fields))


async def is_idle(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(url + "/v1/loads") as response:
        return bool((await response.json())["loads"][0]["num_running_reqs"] == 0)


async def test_openais_client_streams_from_sglang_through_the_gateway(service: Service) -> None:
    question: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    async with client_of(service) as client:
        stream = await client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(**question)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    [usage] = [chunk.usage for chunk in chunks if chunk.usage]
    await service.oracle(rows=2)
    record = await service.record(chunks[0].id)
    assert record["outcome"] == "finished"
    assert (record["prompt_tokens"], record["completion_tokens"]) == (usage.prompt_tokens, 12)


async def test_forms_that_sglang_holds_are_kept_by_any_model_whole_and_streamed(service: Service) -> None:
    """What a model of random weights says is what SGLang's grammar lets it say."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    for fields, fits in (
        ({"response_format": form}, lambda text: set(json.loads(text)) == {"city", "days"}),
        ({"regex": "(yes|no), [0-9]{3}"}, lambda text: text[:-3] in {"yes, ", "no, "} and text[-3:].isdigit()),
        ({"ebnf": 'root ::= "up" | "down"'}, lambda text: text in {"up", "down"}),
    ):
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 200, **fields}
        answers = [await ask(service, **asked), await ask(service, **asked, stream=True)]
        texts = [answers[0].json()["choices"][0]["message"]["content"], CHAT.said(answers[1].events())]
        assert texts[0] == texts[1]
        assert fits(texts[0]), texts[0]
    await service.oracle(rows=6)
    assert {row["outcome"] for row in await service.records()} == {"finished"}


async def test_tools_are_called_as_the_choice_says_whole_and_streamed(service: Service) -> None:
    async with client_of(service) as client:
        await tool_calls.chosen_calls_are_made(client, MODEL)
        await tool_calls.tools_may_be_left_alone(client, MODEL)
    await service.oracle(rows=8)
    assert {row["outcome"] for row in await service.records()} == {"finished"}


async def test_calls_in_our_written_form_are_read_by_sglangs_parser(engine: contract.Engine) -> None:
    await tool_calls.our_written_form_is_read_back(engine)


async def test_a_client_that_leaves_stops_sglang_and_pays_for_what_it_produced(
    service: Service, sglang: SupervisedSglang
) -> None:
    before = await generated(sglang.url)
    async with client_of(service) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count to a thousand."}],
            temperature=0,
            max_tokens=1800,
            stream=True,
        )
        await anext(aiter(stream))
        await stream.close()
    await service.oracle(rows=1)
    [record] = await service.records()
    assert record["outcome"] == "client_disconnected"
    assert 0 < record["completion_tokens"] < 1800
    await eventually_async(lambda: is_idle(sglang.url), within_s=20, what="an idle engine")
    # By the engine's own count, but for the token that was on its way.
    assert 0 <= await generated(sglang.url) - before - record["completion_tokens"] <= 2


async def generated(url: str) -> int:
    """Tokens that the engine has produced since it started."""
    lines = (await read_reports(url, within_s=60)).metrics.splitlines()
    return int(
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("sglang:generation_tokens_total"))
    )


async def test_a_prompt_is_found_in_the_cache_by_its_own_salt_alone(engine: contract.Engine) -> None:
    prompt = [drawn % 300 + 3 for drawn in range(7, 137)]

    async def cached(salt: str) -> int:
        answer = await engine.ask(input_ids=prompt, cache_salt=salt)
        count = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        assert isinstance(count, int)
        return count

    assert [await cached(salt) for salt in ("one", "one", "other", "other")] == [0, 128, 0, 128]


async def test_a_pool_that_is_full_makes_requests_wait_and_loses_none(
    service: Service, sglang: SupervisedSglang
) -> None:
    """Ten prompts of some 1,000 tokens and a pool of 8,192."""
    prompts = [[{"role": "user", "content": f"{number} is the number. " + "so it is, " * 180}] for number in range(10)]
    answers = await asyncio.gather(*(ask(service, messages=prompt, max_tokens=4, stream=True) for prompt in prompts))
    assert [answer.status for answer in answers] == [200] * 10
    assert all(answer.events()[-1] == b"[DONE]" for answer in answers)
    await eventually_async(lambda: is_idle(sglang.url), within_s=20, what="an idle engine")
    await service.oracle(rows=10)
    rows = await service.records()
    assert {row["outcome"] for row in rows} == {"finished"}
    assert sum(row["prompt_tokens"] for row in rows) > 8192


async def test_clients_that_leave_under_load_leave_nothing_behind(service: Service, sglang: SupervisedSglang) -> None:
    async def leave(after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await ask(service, max_tokens=1500, stream=True)

    await asyncio.gather(*(leave(0.1 * number) for number in range(24)))
    await eventually_async(lambda: is_idle(sglang.url), within_s=20, what="an idle engine")
    await eventually_async(service.is_clean, within_s=20, what="a clean service")
    assert (await ask(service, max_tokens=2)).status == 200


async def test_a_server_that_hangs_fails_its_requests_after_the_bound_and_serves_again_when_it_goes_on(
    service: Service, sglang: SupervisedSglang
) -> None:
    """A whole answer says nothing for as long as it takes, and yet its client does not wait for ever."""
    sglang.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(2 * SILENCE_S):
            answers = await asyncio.gather(ask(service, stream=True), ask(service))
        assert all(answer.status >= 500 for answer in answers)
    finally:
        sglang.signal(signal.SIGCONT)
    await service.oracle(rows=2)
    for row in await service.records():
        assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)
    await eventually_async(lambda: _is_up(service), within_s=30, what="a server that is used again")
    assert (await ask(service, max_tokens=2)).status == 200


@pytest.mark.load
async def test_crowds_with_near_identical_prompts_are_left_alone(engine: contract.Engine) -> None:
    await crowds.is_left_alone(engine, requests=CROWD)
    said = await crowds.tags_say(engine.url)
    assert said["requests_aborted"] == said["pages_quarantined"] == 0
    assert said["pairs_checked"] > CROWD


# Behind those that wait for an idle engine: pages that are kept out of circulation count as used.
async def test_a_page_freed_under_a_request_stops_it_alone_before_its_token_leaves(engine: contract.Engine) -> None:
    await crowds.a_lost_page_stops_its_request_alone(engine)


async def test_sglang_killed_in_mid_stream_fails_its_requests_for_free_is_started_again_and_serves(
    service: Service, sglang: SupervisedSglang
) -> None:
    before = sglang.engine_pid()
    async with client_of(service) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count to a thousand."}],
            temperature=0,
            max_tokens=1800,
            stream=True,
        )
        chunks = aiter(stream)
        for _ in range(3):
            await anext(chunks)
        sglang.kill()
        with pytest.raises(openai.APIError):
            [chunk async for chunk in chunks]
    await service.oracle(rows=1)
    [record] = await service.records()
    assert (record["outcome"], record["cost_nano"]) == ("upstream_failed", 0)
    await eventually_async(lambda: _is_down(service), within_s=20, what="a server that is missed")
    await eventually(lambda: sglang.engine_pid() not in {before, None}, within_s=60, what="another server process")
    await eventually_async(lambda: _is_up(service), within_s=READY_S_MAX, what="a server that is started again")
    assert (await ask(service, max_tokens=2)).status == 200
    await service.oracle(rows=2)
    # Nothing of what it was before is left in it: no page in quarantine, and none in use.
    assert (await crowds.tags_say(sglang.url))["pages_quarantined"] == 0
    await eventually_async(lambda: is_idle(sglang.url), within_s=20, what="an idle engine")


async def _is_down(service: Service) -> bool:
    return not await _is_up(service)


async def _is_up(service: Service) -> bool:
    return (await service.send("GET", "/health/ready")).status == 200
