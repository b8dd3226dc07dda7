"""What a KV pool of fixed bytes carries in bf16 and in FP8, at 1 to 64 streams.

    .venv/bin/python -m benchmarks.kv_capacity [--pool-mib 48] [--prompt 96] [--output 48] [--streams 1 2 4 8 16 32 64]

Two engines, one for each format, with the same bytes; a cell is run on one, then on the other. Every stream sends one
request after another until the cell's requests are served. Tokens resident: the largest that `/v1/loads` said while the
cell ran. TTFT: from sending to the first text; ITL: between two texts of a stream. Retractions: how often the engine
took a running request's pages for an earlier one.
"""

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import aiohttp
import orjson

from tests.engines import real_model_path, start_local_engine

FORMATS = ("bf16", "fp8_e4m3")
POLL_S = 0.05
VOCABULARY = 40_000


@dataclass(slots=True)
class Cell:
    resident: int = 0
    pool: int = 0
    tokens_per_second: float = 0.0
    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    retractions: int = 0


class Bench:
    def __init__(self, session: aiohttp.ClientSession, url: str, *, prompt: int, output: int) -> None:
        self._session = session
        self._url = url
        self._prompt = prompt
        self._output = output

    async def run(self, streams: int, requests: int) -> Cell:
        cell = Cell()
        todo = iter(range(requests))
        before = await self._retractions()
        polling = asyncio.create_task(self._poll(cell), name="poll")
        began = time.perf_counter()
        await asyncio.gather(*(self._stream(cell, todo) for _ in range(streams)))
        cell.tokens_per_second = requests * self._output / (time.perf_counter() - began)
        polling.cancel()
        cell.retractions = await self._retractions() - before
        return cell

    async def _stream(self, cell: Cell, todo: Iterator[int]) -> None:
        for number in todo:
            await self._request(cell, number)

    async def _request(self, cell: Cell, number: int) -> None:
        prompt = [(number * 7919 + at * 31) % VOCABULARY + 100 for at in range(self._prompt)]
        body = {"prompt": prompt, "max_tokens": self._output, "temperature": 0, "ignore_eos": True, "stream": True}
        last = time.perf_counter()
        first = True
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                (cell.first_ms if first else cell.gaps_ms).append((now - last) * 1e3)
                last, first = now, False

    async def _poll(self, cell: Cell) -> None:
        while True:
            async with self._session.get(f"{self._url}/v1/loads") as response:
                load = orjson.loads(await response.read())["loads"][0]
            cell.resident = max(cell.resident, load["num_used_tokens"])
            cell.pool = load["max_total_num_tokens"]
            await asyncio.sleep(POLL_S)

    async def _retractions(self) -> int:
        async with self._session.get(f"{self._url}/metrics") as response:
            found = re.search(r"^sglang:num_retracted_requests_total\S* (\S+)$", await response.text(), re.MULTILINE)
        assert found is not None
        return int(float(found[1]))


async def sweep(urls: dict[str, str], options: argparse.Namespace) -> dict[tuple[str, int], Cell]:
    cells = {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        benches = {
            name: Bench(session, url, prompt=options.prompt, output=options.output) for name, url in urls.items()
        }
        for bench in benches.values():
            await bench.run(1, 1)
        for streams in options.streams:
            for name, bench in benches.items():
                cells[name, streams] = await bench.run(streams, max(streams, options.requests))
                print_row(name, streams, cells[name, streams])
    return cells


def print_row(name: str, streams: int, cell: Cell) -> None:
    gaps = sorted(cell.gaps_ms)
    late = gaps[int(0.95 * len(gaps))]
    print(
        f"{name:<9}{streams:>8}{cell.pool:>8}{cell.resident:>10}{cell.tokens_per_second:>9.1f}"
        f"{median(cell.first_ms):>12.0f}{median(gaps):>12.1f}{late:>12.1f}{cell.retractions:>13}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pool-mib", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=96, help="tokens")
    parser.add_argument("--output", type=int, default=48, help="tokens")
    parser.add_argument("--requests", type=int, default=4, help="of a cell, at least")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options = parser.parse_args()
    print(
        f"{options.pool_mib} MiB of cache, prompts of {options.prompt}, outputs of {options.output}\n"
        f"{'cache':<9}{'streams':>8}{'pool':>8}{'resident':>10}{'tok/s':>9}{'TTFT p50 ms':>12}{'ITL p50 ms':>12}"
        f"{'ITL p95 ms':>12}{'retractions':>13}"
    )
    with contextlib.ExitStack() as running:
        urls = {
            name: running.enter_context(
                start_local_engine(
                    real_model_path(), kv_cache_bytes=options.pool_mib << 20, kv_cache_dtype=name, threads=None,
                    max_running_requests=64, disable_radix_cache=True,
                )
            ).url
            for name in FORMATS
        }  # fmt: skip
        cells = asyncio.run(sweep(urls, options))
    for streams in options.streams:
        wide, narrow = (cells[name, streams] for name in FORMATS)
        print(
            f"{streams} streams, fp8 / bf16: {narrow.resident / wide.resident:.2f} x resident, "
            f"{narrow.tokens_per_second / wide.tokens_per_second:.2f} x tok/s"
        )


if __name__ == "__main__":
    main()
