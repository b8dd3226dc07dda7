"""A closed loop of streamed requests with random prompts, timed token by token, spread over processes.

`measure` is for whoever drives a run; each worker is `python -m benchmarks.h200.load`, with a job on its standard input
and its records on its standard output. A job goes either straight to SGLang's /generate, or through the gateway's own
calls (gateway/engine_call.py, gateway/pair_call.py), which is how requests reach replicas and pairs in the service.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

# One process handles some 4,000 chunks a second with room to spare.
_STREAMS_A_WORKER = 16
_TIMEOUT_S = 400


@dataclass(frozen=True)
class Cell:
    """What is measured: streams at once, requests in all, tokens in and out of each."""

    streams: int
    requests: int
    tokens_in: int
    tokens_out: int

    def __str__(self) -> str:
        return f"{self.tokens_in}/{self.tokens_out} x{self.streams}"


@dataclass(frozen=True)
class Target:
    """url: of a server, or of a pair's decode half. prefill and bootstrap: of a pair, the other half and its port."""

    url: str
    prefill: str | None = None
    bootstrap: int | None = None


@dataclass
class Record:
    """One request. gaps_ms: between chunks."""

    begun: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    error: str | None = None
    wasted: int = 0


async def measure(
    label: str, cell: Cell, targets: list[Target], *, vocabulary: int, routed: bool, model: str = ""
) -> dict[str, Any]:
    """Run a cell; its figures: tokens a second over the whole run, times in milliseconds."""
    workers = max(1, cell.streams // _STREAMS_A_WORKER)
    seed = time.time_ns()
    jobs = [
        {
            "streams": share(cell.streams, workers, number),
            "requests": share(cell.requests, workers, number),
            "tokens_in": cell.tokens_in,
            "tokens_out": cell.tokens_out,
            "targets": [asdict(target) for target in targets],
            "vocabulary": vocabulary,
            "routed": routed,
            "model": model,
            "seed": f"{seed}-{number}",
            "begin": time.perf_counter() + 0.6 + 0.02 * workers,
        }
        for number in range(workers)
    ]
    parts = await asyncio.gather(*[_work(job) for job in jobs])
    return {"label": label, **asdict(cell)} | figures([record for part in parts for record in part])


def share(whole: int, workers: int, number: int) -> int:
    return whole // workers + (number < whole % workers)


async def _work(job: dict[str, Any]) -> list[Record]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.h200.load"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    answer, _ = await process.communicate(json.dumps(job).encode())
    assert process.returncode == 0, "a worker ended with an error"
    return [Record(**fields) for fields in orjson.loads(answer)]


def figures(records: list[Record]) -> dict[str, Any]:
    good = [record for record in records if record.error is None and record.tokens]
    errors = [record.error for record in records if record.error is not None]
    if not good:
        return {"errors": len(errors), "error": errors[:1]}
    seconds = max(record.last for record in good) - min(record.begun for record in good)
    firsts = [1e3 * (record.first - record.begun) for record in good]
    gaps = [gap for record in good for gap in record.gaps_ms]
    return {
        "seconds": round(seconds, 3),
        "tokens_s": round(sum(record.tokens for record in good) / seconds, 1),
        "first_ms_p50": round(quantile(firsts, 0.5), 1),
        "first_ms_p95": round(quantile(firsts, 0.95), 1),
        "between_ms_p50": round(quantile(gaps, 0.5), 3),
        "between_ms_p95": round(quantile(gaps, 0.95), 3),
        "between_ms_p99": round(quantile(gaps, 0.99), 3),
        "wasted_prefill_tokens": sum(record.wasted for record in records),
        "good": len(good),
        "errors": len(errors),
        "error": errors[:1],
    }


def quantile(values: list[float], share_below: float) -> float:
    """Linear between neighbours; not a number if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = (len(ordered) - 1) * share_below
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


async def generate(
    session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, **extra: Any
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """SGLang's own stream: how many tokens there are after each event, and the event."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "stream": True, "sampling_params": sampling, **extra}
    async with session.post(f"{url}/generate", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event)[:300])
                yield event["meta_info"]["completion_tokens"], event


class _Worker:
    """One process's share of a cell."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._random = random.Random(job["seed"])
        self._left = job["requests"]
        self._number = 0
        self.records: list[Record] = []

    async def run(self) -> None:
        targets, timeout = self._job["targets"], aiohttp.ClientTimeout(total=_TIMEOUT_S)
        if self._job["routed"]:
            # Only here: they need the gateway's packages.
            from backends.connections import open_session  # noqa: PLC0415
            from benchmarks.h200.routed import Routed  # noqa: PLC0415

            async with open_session() as engines:
                await self._all(Routed(engines, targets, self._job["model"]).tokens)
        else:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
                await self._all(_Straight(session, targets).tokens)

    async def _all(self, stream: Callable[..., AsyncIterator[int]]) -> None:
        await asyncio.sleep(self._job["begin"] - time.perf_counter())
        await asyncio.gather(*[self._stream_after_stream(stream) for _ in range(self._job["streams"])])

    async def _stream_after_stream(self, stream: Callable[..., AsyncIterator[int]]) -> None:
        while self._left:
            self._left -= 1
            self._number += 1
            draw = self._random.randrange
            prompt = [draw(1000, self._job["vocabulary"]) for _ in range(self._job["tokens_in"])]
            record = Record(begun=time.perf_counter())
            self.records.append(record)
            times = []
            try:
                async for tokens in stream(record, prompt, self._job["tokens_out"], self._number):
                    if tokens > record.tokens:
                        times.append(time.perf_counter())
                        record.tokens = tokens
            except Exception as error:  # noqa: BLE001 - whatever it is belongs in the figures
                record.error = f"{type(error).__name__}: {error}"[:300]
            if times:
                record.first, record.last = times[0], times[-1]
                record.gaps_ms = [round(1e3 * (after - before), 3) for before, after in pairwise(times)]


class _Straight:
    def __init__(self, session: aiohttp.ClientSession, targets: list[dict[str, Any]]) -> None:
        self._session, self._targets = session, targets

    async def tokens(self, record: Record, prompt: list[int], tokens: int, number: int) -> AsyncIterator[int]:
        del record
        url = self._targets[number % len(self._targets)]["url"]
        async for count, _ in generate(self._session, url, prompt, tokens):
            yield count


async def _main() -> None:
    worker = _Worker(json.load(sys.stdin))
    await worker.run()
    sys.stdout.buffer.write(orjson.dumps([asdict(record) for record in worker.records]))


if __name__ == "__main__":
    asyncio.run(_main())
