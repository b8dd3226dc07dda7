"""Memory and CPU of the gateway's process for one long answer with log-probabilities that is not streamed.

    python -m benchmarks.answer_memory --tokens 8000 --choices 1

Starts `python -m api` in front of the scripted engine, which says 20 alternatives for each token, and prints by how
much the process's resident memory grew at most. Linux alone says that.
"""

import argparse
import asyncio
import random
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Script
from tests.doubles.waiting import eventually_async
from tests.e2e.process import ServeProcess, serve_process
from tests.engines import build_tiny_checkpoint

_ALTERNATIVES = 20
_TEXTS = (" the", "abc", " token", "!", " representative")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one answer: its bytes, by how many bytes resident memory grew at most, and seconds of CPU."""

    answer_bytes: int
    grown: int
    cpu_s: float


def events(tokens: int) -> tuple[bytes, ...]:
    """What an engine says for one choice."""
    drawn = random.Random(1)

    def named() -> dict[str, Any]:
        text = drawn.choice(_TEXTS)
        return {"token": text, "bytes": list(text.encode()), "logprob": -20 * drawn.random()}

    said = []
    for number in range(1, tokens + 1):
        chosen = named()
        logprobs = {"content": [chosen | {"top_logprobs": [named() for _ in range(_ALTERNATIVES)]}]}
        said.append(_event({"content": chosen["token"]}, number, logprobs=logprobs))
    said.append(_event({}, tokens, finish_reason="length"))
    return (*said, b"data: [DONE]\n\n")


async def cost_of(process: ServeProcess, engine: ScriptedEngine, tokens: int, choices: int) -> Cost:
    bootstrap, watched = process.bootstrap(), psutil.Process(process.pid)
    body = {
        "model": "@cf/huggingfacetb/smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": max(2_000, tokens),
        "n": choices,
        "logprobs": True,
        "top_logprobs": _ALTERNATIVES,
    }
    headers = {"Authorization": f"Bearer {bootstrap['api_key']}"}
    engine.script = Script(raw=events(tokens))
    before, began_s = watched.memory_info().rss, _cpu_s(watched)
    async with (
        aiohttp.ClientSession() as session,
        session.post(process.base_url + "/v1/chat/completions", json=body, headers=headers) as response,
    ):
        answer = await response.read()
        assert response.status == 200, answer[:500]
    return Cost(len(answer), _most(process.pid) - before, _cpu_s(watched) - began_s)


async def served(folder: Path, tokens: int, choices: int) -> Cost:
    checkpoint = build_tiny_checkpoint(folder / "tiny")
    async with ScriptedEngine(pool_tokens=2 * choices * tokens + 100_000, context_tokens=tokens + 10_000) as engine:
        variables = {"PAGEGATE_ENGINE__URL": engine.url, "PAGEGATE_LOG_LEVEL": "error"}
        with serve_process(folder / "home", checkpoint, **variables) as process:
            await eventually_async(partial(asyncio.to_thread, process.is_ready), within_s=90, what="a ready gateway")
            await cost_of(process, engine, 100, choices)  # what it takes once
            return await cost_of(process, engine, tokens, choices)


def _event(delta: dict[str, Any], tokens: int, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
    usage = {
        "prompt_tokens": 5,
        "total_tokens": 5 + tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": None,
    }
    chunk = {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + orjson.dumps(chunk | {"usage": usage}) + b"\n\n"


def _most(pid: int) -> int:
    """The most bytes of resident memory that the process has had, as Linux says it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8_000)
    parser.add_argument("--choices", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        cost = asyncio.run(served(Path(made), given.tokens, given.choices))
    print(
        f"{cost.answer_bytes / _MIB:.1f} MiB of answer, at most {cost.grown / _MIB:.1f} MiB more memory, "
        f"{cost.cpu_s:.2f} s of CPU"
    )
