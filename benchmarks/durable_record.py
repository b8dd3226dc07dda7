"""What the durable record costs: CPU per request for begin + finish at 1 and 32 concurrent, and the drain's speed.

    python -m benchmarks.durable_record [requests]

Real files, real syncs, in a temporary folder of TMPDIR. CPU is that of the whole process (both threads, system time
included), so the shared sync is in it; the drain to SQL is measured apart, afterwards.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from billing.metering import Metering
from billing.price_book import Price, PriceBook, seed_default_price
from billing.spool import Spool
from billing.usage import RequestFacts, TokenUsage, UsageRecord
from tenancy.database import open_database
from tenancy.migrations import upgrade_schema

_MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
_CONCURRENT = (1, 32)


@dataclass(frozen=True, slots=True)
class _Timing:
    requests_s: float
    cpu_us: float


async def _one(metering: Metering, price: Price, number: int) -> None:
    facts = RequestFacts(
        request_id=f"01990000-0000-7000-8000-{number:012x}",
        account_id="0" * 32,
        key_id="1" * 32,
        model=_MODEL,
        endpoint="chat",
        stream=True,
        prompt_tokens=50,
        price_version=price.version,
        started_at_ns=time.time_ns(),
    )
    metering.begin(facts)
    record = UsageRecord(
        facts=facts,
        outcome="finished",
        usage=TokenUsage(50, 0, 100, 0),
        charged=True,
        ended_at_ns=time.time_ns(),
        queued_ms=0,
        ttft_ms=30,
        replica="local-0",
        finish_reason="stop",
        code=None,
    )
    await metering.finish(record, price)


async def _timed(metering: Metering, price: Price, numbers: "count[int]", *, requests: int, concurrent: int) -> _Timing:
    async def worker() -> None:
        for _ in range(requests // concurrent):
            await _one(metering, price, next(numbers))

    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for index in range(concurrent):
            group.create_task(worker(), name=f"worker {index}")
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    done = requests // concurrent * concurrent
    return _Timing(done / wall, cpu / done * 1e6)


async def _measure(folder: Path, requests: int) -> None:
    database = open_database(f"sqlite:///{folder}/pagegate.db")
    upgrade_schema(database.engine)
    seed_default_price(
        database,
        _MODEL,
        input_nano_per_m=10_000_000,
        cached_input_nano_per_m=2_500_000,
        output_nano_per_m=40_000_000,
        now_ns=0,
    )
    book = PriceBook(database)
    await book.refresh()
    spool = Spool(folder / "spool")
    metering = Metering(spool, database, book)
    price = book.price_in_force(_MODEL, time.time_ns())
    numbers = count()
    for concurrent in _CONCURRENT:
        timing = await _timed(metering, price, numbers, requests=requests, concurrent=concurrent)
        print(f"{concurrent:3} concurrent: {timing.cpu_us:6.1f} µs CPU/request, {timing.requests_s:8,.0f} requests/s")
    wall, cpu = time.perf_counter(), time.process_time()
    drained = 0
    while posted := await metering.drain_once():
        drained += posted
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"drain: {drained / wall:,.0f} events/s, {cpu / drained * 1e6:.1f} µs CPU/event ({drained:,} events)")
    spool.close()
    database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, nargs="?", default=5_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(Path(folder), asked.requests))


if __name__ == "__main__":
    main()
