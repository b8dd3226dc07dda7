"""What a database that is away costs a request: PostgreSQL is stopped, started, hung and woken under steady load.

    .venv/bin/python -m benchmarks.database_away [--rate 20] [--seconds 8]

A whole gateway in front of a scripted engine, on a real PostgreSQL and Valkey, with a prepaid account. Requests start
on schedule whether or not earlier ones have ended, and are timed from then. What was allowed before is served on, and
refused (503) when it is spent; both are timed. Added is what half, 95 and 99 of 100, and the slowest took more than
the median while the database answered. The goal is 100 ms.
"""

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from billing.ledger.payers import AccountMode
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service
from tests.engines import build_tiny_checkpoint
from tests.stores import PostgresServer, ValkeyServer

_RECOVERY_S_MAX = 15.0


@dataclass
class _Answered:
    """took_ms: from the scheduled start to the whole answer."""

    took_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def quantile(self, share: float) -> float:
        return sorted(self.took_ms)[int(share * (len(self.took_ms) - 1))]


async def _one(service: Service, scheduled: float, answered: _Answered) -> None:
    answer = await service.post(CHAT.path(service), CHAT.body(service, max_tokens=2))
    answered.took_ms.append((time.perf_counter() - scheduled) * 1_000)
    answered.statuses[answer.status] += 1


async def _load(service: Service, rate: int, seconds: float) -> _Answered:
    answered, started = _Answered(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            scheduled = started + number / rate
            await asyncio.sleep(max(0.0, scheduled - time.perf_counter()))
            group.create_task(_one(service, scheduled, answered), name="a request")
    return answered


async def _measure(folder: Path, postgres: PostgresServer, valkey: ValkeyServer, rate: int, seconds: float) -> None:
    shared: dict[str, Any] = {"meters_url": valkey.url}
    checkpoint = build_tiny_checkpoint(folder / "tiny")
    with postgres.database() as url:
        async with (
            ScriptedEngine() as engine,
            running_service(folder / "home", checkpoint, engine, database_url=url, **shared) as service,
        ):
            service.services.wallets.set_mode(service.account_id, AccountMode.PREPAID)
            service.services.wallets.top_up(service.account_id, 10**9, idempotency_key="plenty")
            await service.services.holds.credit.refresh()
            await _load(service, rate, 1)  # warm
            for how, leave, come_back in (
                ("is stopped", postgres.stop, postgres.start),
                ("hangs", postgres.hang, postgres.wake),
            ):
                before = await _load(service, rate, seconds)
                leave()
                _print(how, before, await _load(service, rate, seconds))
                come_back()
                await eventually(lambda: not service.services.database.away, within_s=_RECOVERY_S_MAX)
                await service.services.metering.flush()


def _print(how: str, before: _Answered, away: _Answered) -> None:
    usual = statistics.median(before.took_ms)
    added = ", ".join(
        f"{name} {away.quantile(share) - usual:.1f}"
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("slowest", 1))
    )
    statuses = ", ".join(f"{count} answered {status}" for status, count in sorted(away.statuses.items()))
    print(
        f"PostgreSQL {how}: added {added} ms ({statuses}; while it answers p50 {usual:.1f}, "
        f"p99 {before.quantile(0.99):.1f} ms)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, default=20, help="requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="of load, before and while it is away")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres, ValkeyServer() as valkey:
        asyncio.run(_measure(Path(folder), postgres, valkey, arguments.rate, arguments.seconds))


if __name__ == "__main__":
    main()
