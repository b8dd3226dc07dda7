"""Real SGLang behind the gateway: attached to, streamed from with OpenAI's client, and killed in mid-stream."""

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
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import model, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process
from tests.e2e.service import Answer, Service, running_service
from tests.engines import real_model_path
from tests.sglang_cpu.server import TEST_S_MAX, SglangServer, sglang_python, start_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_S_MAX)]
SILENCE_S = 20.0
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
# SGLang's own parser, without resolving anything (that would look for GPUs and checkpoints).
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for arguments in json.load(sys.stdin):
    parser.parse_args(arguments)
"""


@pytest.fixture(scope="module")
def sglang() -> Iterator[SglangServer]:
    with start_sglang(real_model_path(), model_id=MODEL) as server:
        yield server


@pytest.fixture
async def gateway(sglang: SglangServer, tmp_path: Path) -> AsyncIterator[ServeProcess]:
    with serve_process(tmp_path / "home", real_model_path(), PAGEGATE_ENGINE__URL=sglang.url) as process:
        await eventually(process.is_ready, within_s=START_S_MAX, what="a ready gateway")
        yield process


def client_of(base: dict[str, str]) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base["base_url"] + "/v1", api_key=base["api_key"], max_retries=0, timeout=120)


def is_settled(gateway: ServeProcess, base: dict[str, str], *, rows: int) -> bool:
    """No hold, slot or money is left, and as many usage records are there."""
    state = gateway.get("/console/v1/invariants", base["admin_key"])
    assert state["violations"] == []
    held = [state[name] for name in ("live_holds", "live_slots", "held_nano", "kv_pages_held")]
    return not any(held) and len(records(gateway, base)) == rows


def records(gateway: ServeProcess, base: dict[str, str]) -> list[dict[str, Any]]:
    answer = gateway.get(f"/console/v1/accounts/{base['account_id']}/requests?limit=200", base["admin_key"])
    rows = answer["requests"]
    assert isinstance(rows, list)
    return rows


def changed(model: Model, **fields: Any) -> Model:
    return Deployment.model_validate({"models": [model.model_dump() | fields]}).models[0]


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


async def test_a_server_is_what_the_file_says_that_it_was_launched_from(sglang: SglangServer) -> None:
    reports = await read_reports(sglang.url, within_s=60)
    replica = sglang.model.replicas[0]
    assert contradictions(sglang.model, "unified", replica, reports) == []
    other = changed(sglang.model, kv_cache_dtype="bf16", page_tokens=64)
    assert [sentence.split()[0] for sentence in contradictions(other, "decode", replica, reports)] == [
        "--page-size",
        "--kv-cache-dtype",
        "--disaggregation-mode",
    ]


async def test_openais_client_streams_from_sglang_through_the_gateway(gateway: ServeProcess) -> None:
    base = gateway.bootstrap()
    async with client_of(base) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    [usage] = [chunk.usage for chunk in chunks if chunk.usage]
    await eventually(lambda: is_settled(gateway, base, rows=1), within_s=20, what="a settled request")
    [record] = records(gateway, base)
    assert (record["id"], record["outcome"]) == (chunks[0].id, "finished")
    assert (record["prompt_tokens"], record["completion_tokens"]) == (usage.prompt_tokens, usage.completion_tokens)


async def test_a_client_that_leaves_stops_sglang_and_pays_for_what_it_produced(
    gateway: ServeProcess, sglang: SglangServer
) -> None:
    base = gateway.bootstrap()
    async with client_of(base) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Count to a thousand."}], max_tokens=1000, stream=True
        )
        await anext(aiter(stream))
        await stream.close()
    await eventually(lambda: is_settled(gateway, base, rows=1), within_s=20, what="a settled request")
    [record] = records(gateway, base)
    assert record["outcome"] == "client_disconnected"
    assert 0 < record["completion_tokens"] < 1000
    await eventually_async(lambda: is_idle(sglang.url), within_s=20, what="an idle engine")


async def is_idle(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(url + "/v1/loads") as response:
        return bool((await response.json())["loads"][0]["num_running_reqs"] == 0)


@pytest.fixture
async def service(tmp_path: Path, sglang: SglangServer) -> AsyncIterator[Service]:
    """A gateway that has asked the server whether it is what the file says: an FP8 cache, page tags."""
    weights = {"checkpoint": str(real_model_path()), "precision": "bf16"}
    replica = {"url": sglang.url, "weights": weights, "reserved_output_tokens_max": 256}
    promised: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "page_tags": True}
    file = write_deployment(tmp_path / "d.toml", model(real_model_path(), replicas=[replica], **promised))
    nobody = ScriptedEngine()  # where a service of scripted engines has one: it is not even started
    bounds = {"silence_s_max": SILENCE_S, "answer_s_max": SILENCE_S}
    async with running_service(
        tmp_path / "home", real_model_path(), nobody, deployment=file, backends=bounds
    ) as service:
        yield service


async def ask(service: Service, **fields: Any) -> Answer:
    return await service.post("/v1/chat/completions", CHAT.body(service, **fields))


async def test_a_pool_that_is_full_makes_requests_wait_and_loses_none(service: Service, sglang: SglangServer) -> None:
    """Ten prompts of some 1,000 tokens and a pool of 8,192."""
    prompts = [
        [{"role": "user", "content": f"{number} is the number. " + "Say the word again. " * 190}]
        for number in range(10)
    ]
    answers = await asyncio.gather(*(ask(service, messages=prompt, max_tokens=4, stream=True) for prompt in prompts))
    assert [answer.status for answer in answers] == [200] * 10
    assert all(answer.events()[-1] == b"[DONE]" for answer in answers)
    await eventually_async(lambda: is_idle(sglang.url), within_s=20, what="an idle engine")
    await service.oracle(rows=10)
    assert {row["outcome"] for row in await service.records()} == {"finished"}


async def test_clients_that_leave_under_load_leave_nothing_behind(service: Service, sglang: SglangServer) -> None:
    async def leave(after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await ask(service, max_tokens=300, stream=True)

    await asyncio.gather(*(leave(0.1 * number) for number in range(24)))
    await eventually_async(lambda: is_idle(sglang.url), within_s=20, what="an idle engine")
    await eventually_async(service.is_clean, within_s=20, what="a clean service")
    assert (await ask(service, max_tokens=2)).status == 200


async def test_a_server_that_hangs_fails_its_requests_after_the_bound_and_serves_again_when_it_goes_on(
    service: Service, sglang: SglangServer
) -> None:
    sglang.signal(signal.SIGSTOP)
    try:
        answers = await asyncio.gather(ask(service, stream=True), ask(service))
        assert all(answer.status >= 500 for answer in answers)
    finally:
        sglang.signal(signal.SIGCONT)
    await service.oracle(rows=2)
    for row in await service.records():
        assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)
    await eventually_async(lambda: _serves(service), within_s=30, what="a server that is used again")


async def _serves(service: Service) -> bool:
    return (await ask(service, max_tokens=2)).status == 200


# The last test of this file: nobody has this server after it.
async def test_sglang_killed_in_mid_stream_ends_the_stream_with_an_error_and_nobody_pays(
    gateway: ServeProcess, sglang: SglangServer
) -> None:
    base = gateway.bootstrap()
    async with client_of(base) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Count to a thousand."}], max_tokens=1000, stream=True
        )
        chunks = aiter(stream)
        for _ in range(3):
            await anext(chunks)
        sglang.kill()
        with pytest.raises(openai.APIError):
            [chunk async for chunk in chunks]
    await eventually(lambda: is_settled(gateway, base, rows=1), within_s=20, what="a settled request")
    [record] = records(gateway, base)
    assert (record["outcome"], record["cost_nano"]) == ("upstream_failed", 0)
