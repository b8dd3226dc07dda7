"""CPU of one exchange with an engine, by our own connections and by aiohttp, in turn within one run.

    .venv/bin/python -m benchmarks.engine_client

The engine is gateway_cost_engine.py in a process of its own; only this process's CPU counts. Answers are whole, 16 at
once, with the body of a prompt of 50 tokens.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import orjson
import uvloop

from backends.client import EngineClient
from backends.connections import open_session
from backends.settings import BackendSettings
from benchmarks.gateway_cost import HERE, await_up, child, free_port

ROUNDS = 7
EXCHANGES = 2_000
AT_ONCE = 16
PATH = "/v1/chat/completions"
BODY = orjson.dumps({"model": "m", "max_tokens": 16, "stream": False, "input_ids": list(range(50))})


async def main(url: str) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as theirs, open_session() as session:
        client = EngineClient(url, session, BackendSettings())

        async def by_us() -> None:
            answer = await client.ask(PATH, BODY)
            await answer.fields()
            answer.close()

        async def by_aiohttp() -> None:
            async with theirs.post(url + PATH, data=BODY, headers={"Content-Type": "application/json"}) as response:
                orjson.loads(await response.read())

        costs: dict[str, list[float]] = {"own connections": [], "aiohttp": []}
        for _ in range(ROUNDS):
            costs["own connections"].append(await cost_us(by_us))
            costs["aiohttp"].append(await cost_us(by_aiohttp))
    for name, taken in costs.items():
        print(f"{name:<16}{statistics.median(taken):6.0f} us of CPU an exchange")


async def cost_us(exchange: Callable[[], Awaitable[None]]) -> float:
    left = [EXCHANGES]

    async def one_after_the_other() -> None:
        while left[0] > 0:
            left[0] -= 1
            await exchange()

    began = time.process_time()
    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
    return (time.process_time() - began) / EXCHANGES * 1e6


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    port = free_port()
    with child([sys.executable, HERE / "gateway_cost_engine.py", "--port", port], None):
        await_up(port, "/health")
        uvloop.run(main(f"http://127.0.0.1:{port}"))
