"""Memory of the gateway's process over very many short streams, of which three in ten are left after their first bytes.

    python -m benchmarks.stream_memory --streams 100000

Starts `python -m api` in front of the scripted engine, and prints its resident memory as it goes: what a stream leaves
behind would show as a slope. The test of the same measures fewer.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import psutil

from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually_async
from tests.e2e.process import ServeProcess, serve_process
from tests.engines import build_tiny_checkpoint

_AT_ONCE = 32
_TOKENS = 8
# Of ten streams these are left early.
_LEFT = frozenset({1, 4, 7})


@dataclass(frozen=True, slots=True)
class Sample:
    """After so many streams: bytes of resident memory, and seconds since the start."""

    streams: int
    rss: int
    at_s: float


async def measure(
    process: ServeProcess, streams: int, *, every: int, say: Callable[[Sample], None] = lambda _: None
) -> list[Sample]:
    """Streams through a gateway that is ready; a sample before the first and after each `every`."""
    bootstrap = process.bootstrap()
    body = {"model": "@cf/huggingfacetb/smollm2-135m-instruct", "prompt": "hi", "max_tokens": _TOKENS, "stream": True}
    headers = {"Authorization": f"Bearer {bootstrap['api_key']}"}
    url = process.base_url + "/v1/completions"
    watched, began = psutil.Process(process.pid), asyncio.get_running_loop().time()
    samples: list[Sample] = []

    def take(done: int) -> None:
        samples.append(Sample(done, watched.memory_info().rss, asyncio.get_running_loop().time() - began))
        say(samples[-1])

    numbers = iter(range(streams))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            response = await session.post(url, json=body, headers=headers)
            assert response.status == 200, await response.text()
            if number % 10 in _LEFT:
                await response.content.readany()
                response.close()
            else:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            if (number + 1) % every == 0:
                take(number + 1)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_AT_ONCE)) as session:
        take(0)
        await asyncio.gather(*(client(session) for _ in range(_AT_ONCE)))
    return samples


async def served(folder: Path, streams: int, *, every: int, say: Callable[[Sample], None]) -> list[Sample]:
    checkpoint = build_tiny_checkpoint(folder / "tiny")
    async with ScriptedEngine() as engine:
        variables = {"PAGEGATE_ENGINE__URL": engine.url, "PAGEGATE_LOG_LEVEL": "error"}
        with serve_process(folder / "home", checkpoint, **variables) as process:
            await eventually_async(partial(asyncio.to_thread, process.is_ready), within_s=90, what="a ready gateway")
            return await measure(process, streams, every=every, say=say)


def _say(sample: Sample) -> None:
    print(f"{sample.streams:>8} streams  {sample.rss / 2**20:7.1f} MiB  {sample.at_s:7.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(served(Path(made), given.streams, every=max(1, given.streams // 10), say=_say))
