"""A service that is killed in the middle of a batch goes on with it: a line ends once and is charged once at most."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
LINES = 40
TOKENS = 6


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        engine.steer(itl_ms=25)
        yield engine


def _line(at: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Number {at}."}], "max_tokens": TOKENS}
    line = {"custom_id": f"line-{at}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode()


async def _ready(process: ServeProcess) -> dict[str, str]:
    # The engine is in this process, and answers the gateway meanwhile.
    await eventually_async(partial(asyncio.to_thread, process.is_ready), within_s=START_S_MAX, what="a ready service")
    return process.bootstrap()


async def _answers(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


@pytest.mark.load
async def test_a_batch_outlives_kills_and_no_line_is_charged_twice(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    with serve_process(tmp_path / "home", checkpoint, PAGEGATE_ENGINE__URL=engine.url) as process:
        base = await _ready(process)
        async with openai.AsyncOpenAI(base_url=base["base_url"] + "/v1", api_key=base["api_key"]) as client:
            content = b"\n".join(map(_line, range(LINES)))
            file = await client.files.create(file=("kill.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            for begun in (8, 20):
                await eventually(lambda most=begun: len(engine.requests) >= most, within_s=30, what="begun lines")  # type: ignore[misc]  # its default
                process.kill()
                await eventually(lambda: not engine.live, within_s=10, what="the end of what nobody reads")
                process.start()
                await _ready(process)

            async def is_over() -> bool:
                return (await client.batches.retrieve(batch.id)).status == "completed"

            await eventually_async(is_over, within_s=60, what="the end of the batch")
            batch = await client.batches.retrieve(batch.id)
            good = await _answers(client, batch.output_file_id)
            bad = await _answers(client, batch.error_file_id)
        kept = f"/console/v1/accounts/{base['account_id']}/requests?limit=200"
        records = (await asyncio.to_thread(process.get, kept, base["admin_key"]))["requests"]
        invariants = await asyncio.to_thread(process.get, "/console/v1/invariants", base["admin_key"])

    told = Counter(one["custom_id"] for one in good + bad)
    assert told == Counter(f"line-{at}" for at in range(LINES))
    assert {one["error"]["code"] for one in bad} <= {"server_stopped"}
    prompts = {request.body["rid"]: tuple(request.body["input_ids"]) for request in engine.requests}
    charged: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for record in records:
        if record["cost_nano"] > 0:
            charged[prompts[record["id"]]].append(record["id"])
    assert {len(ids) for ids in charged.values()} == {1}, "one charge for a line"
    finished = {record["id"] for record in records if record["outcome"] == "finished"}
    for one in good:
        assert one["response"]["body"]["usage"]["completion_tokens"] == TOKENS
    assert len(finished & {one["response"]["request_id"] for one in good}) >= len(good) - 16
    assert invariants["violations"] == []
    assert len(engine.requests) - LINES <= 16, "only lines that were running are run again"
