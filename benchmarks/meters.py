"""What limits cost: a reservation and its settle on one hot account, in process and over a real Valkey.

    python -m benchmarks.meters [reservations per second] [seconds]

Each request reserves under five limits and a concurrency limit, and settles at once. Requests start on schedule whether
or not earlier ones have ended, so that a slow answer shows in the figures of those behind it; latencies are counted
from the scheduled start. Then the server is hung, and the slowest reservation of the next second is what that added.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tenancy.claims import Meter
from tenancy.meters.process import ProcessMeters
from tenancy.meters.protocol import Meters, Reservation
from tenancy.meters.redis import RedisMeters
from tenancy.principal import Principal
from tenancy.quotas import LIMIT_MAX, Amounts, Quota
from tests.stores import ValkeyServer

_METERS = (
    Meter.REQUESTS_PER_MINUTE,
    Meter.INPUT_TOKENS_PER_MINUTE,
    Meter.OUTPUT_TOKENS_PER_MINUTE,
    Meter.TOKENS_PER_DAY,
    Meter.NEURONS_PER_DAY,
)
_HOT = Principal("a" * 32, "k", frozenset(), 10_000, None, quotas=tuple(Quota(meter, LIMIT_MAX) for meter in _METERS))
_AMOUNTS = Amounts(tokens_in=100, tokens_out=1_024, neurons_micro=5_000)


@dataclass(frozen=True, slots=True)
class _Timing:
    latencies_ms: Sequence[float]
    cpu_us: float  # of this process, for one reservation and settle

    def quantile(self, share: float) -> float:
        return sorted(self.latencies_ms)[int(share * (len(self.latencies_ms) - 1))]


async def _one(meters: Meters, number: int, latencies_ms: list[float], scheduled: float) -> None:
    ticket = await meters.reserve(_HOT, Reservation(f"r{scheduled}-{number}", "m", _AMOUNTS))
    latencies_ms.append((time.perf_counter() - scheduled) * 1_000)
    await meters.settle(ticket, Amounts(tokens_in=100, tokens_out=50, neurons_micro=300))


async def _load(meters: Meters, rate: int, seconds: float) -> _Timing:
    latencies_ms: list[float] = []
    started, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            scheduled = started + number / rate
            await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
            group.create_task(_one(meters, number, latencies_ms, scheduled), name="a request")
    return _Timing(latencies_ms, (time.process_time() - cpu) * 1e6 / len(latencies_ms))


async def _shared(deed: Callable[[RedisMeters, ValkeyServer], Awaitable[None]]) -> None:
    with ValkeyServer() as server:
        meters = RedisMeters(server.url)
        await meters.open()
        try:
            await deed(meters, server)
        finally:
            await meters.close()


async def main(rate: int, seconds: float) -> None:
    _print("in process", rate, await _load(ProcessMeters(), rate, seconds))

    async def over_valkey(meters: RedisMeters, server: ValkeyServer) -> None:
        await _load(meters, rate, 0.5)  # warm
        _print("Valkey", rate, await _load(meters, rate, seconds))
        server.hang()
        timing = await _load(meters, rate, 1)
        print(f"Valkey hangs: slowest reservation {timing.quantile(1):.0f} ms, p99 {timing.quantile(0.99):.1f} ms")

    await _shared(over_valkey)


def _print(name: str, rate: int, timing: _Timing) -> None:
    print(
        f"{name}, {rate} reservations/s on one account: p50 {timing.quantile(0.5):.2f} ms, "
        f"p99 {timing.quantile(0.99):.2f} ms, {timing.cpu_us:.0f} µs CPU for a reservation and its settle"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rate", type=int, nargs="?", default=1_000, help="reservations a second")
    parser.add_argument("seconds", type=float, nargs="?", default=5.0)
    asked = parser.parse_args()
    asyncio.run(main(asked.rate, asked.seconds))
