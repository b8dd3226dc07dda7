"""How long answers took to begin: percentiles over an account's newest requests. The console and the dashboard read.

Percentiles can't be added up, so there is no rollup of them: the newest few thousand are read, which bounds the query.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from billing.tables import usage_events
from tenancy.database import Database

SAMPLE_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds to the first token; None without an answer. sampled: over how many answers."""

    sampled: int
    ttft_ms_p50: int | None
    ttft_ms_p95: int | None


def latency_of(database: Database, account_id: str, from_ns: int, to_ns: int) -> Latency:
    query = (
        sa.select(usage_events.c.ttft_ms)
        .where(
            usage_events.c.account_id == account_id,
            usage_events.c.started_at_ns >= from_ns,
            usage_events.c.started_at_ns < to_ns,
            usage_events.c.ttft_ms.is_not(None),
        )
        .order_by(usage_events.c.started_at_ns.desc())
        .limit(SAMPLE_MAX)
    )
    with database.read() as connection:
        times = sorted(map(int, connection.scalars(query)))
    return Latency(len(times), percentile(times, 50), percentile(times, 95))


def percentile(ordered: Sequence[int], percent: int) -> int | None:
    """The nearest rank: the least value that `percent` of all do not exceed."""
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
