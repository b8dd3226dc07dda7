"""How long answers took to begin: a histogram of fixed buckets, since percentiles can't be added up and buckets can.

Kept by hour and by day and model in the transaction that posts the events; posting.py adds, the console and the
dashboard read, audit.py recomputes. Parts of hours come from the events, as with all sums.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import sqlalchemy as sa

from billing.rollups import GRAINS_NS
from billing.summaries import cut_up
from billing.tables import usage_events, usage_first_tokens
from tenancy.database import Database, insert_missing

# Milliseconds that a bucket ends at, itself included; beyond the last lies one more. They never change: kept sums are
# by their number (a new set would be a new table).
BOUNDS_MS: Final = (
    *(5, 10, 20, 30, 40, 50, 65, 80, 100, 125, 150, 200, 250, 300, 400, 500, 650, 800, 1_000, 1_250, 1_500, 2_000),
    *(2_500, 3_000, 4_000, 5_000, 6_500, 8_000, 10_000, 12_500, 15_000, 20_000, 30_000, 60_000, 120_000),
)
_KEYS: Final = ("account_id", "grain", "period_start_ns", "model", "bucket")


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds to the first token; None without an answer. answers: how many that was.

    A percentile is the end of its bucket: the truth is at most that, and above the end of the bucket before. buckets:
    (its end in milliseconds, None for the last; how many answers) of those that have any.
    """

    answers: int
    ttft_ms_p50: int | None
    ttft_ms_p95: int | None
    buckets: tuple[tuple[int | None, int], ...] = ()


def bucket_of(ttft_ms: int) -> int:
    return bisect_left(BOUNDS_MS, ttft_ms)


def add_first_tokens(connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """rows: of usage_events, new ones. In the caller's write transaction."""
    counts: dict[tuple[Any, ...], int] = {}
    for row in rows:
        if row["ttft_ms"] is None:
            continue
        for grain, length_ns in GRAINS_NS.items():
            start_ns = row["started_at_ns"] // length_ns * length_ns
            key = (row["account_id"], grain, start_ns, row["model"], bucket_of(row["ttft_ms"]))
            counts[key] = counts.get(key, 0) + 1
    if not counts:
        return
    # In order of key, so that two processes that post at once can't lock each other out.
    keys = sorted(counts)
    table = usage_first_tokens
    insert_missing(connection, table, [dict(zip(_KEYS, key, strict=True)) | {"requests": 0} for key in keys])
    update = table.update().values(requests=table.c.requests + sa.bindparam("more"))
    for name in _KEYS:
        update = update.where(table.c[name] == sa.bindparam(f"of_{name}"))
    connection.execute(
        update,
        [{f"of_{name}": value for name, value in zip(_KEYS, key, strict=True)} | {"more": counts[key]} for key in keys],
    )


def latency_of(database: Database, account_id: str, from_ns: int, to_ns: int, model: str | None = None) -> Latency:
    """Of answers whose requests began in [from_ns, to_ns)."""
    counts: dict[int, int] = {}
    with database.read() as connection:
        for stretch in cut_up(from_ns, to_ns, ("day", "hour")):
            if stretch.grain is None:
                found = _of_events(connection, account_id, stretch.from_ns, stretch.to_ns, model)
            else:
                found = _of_kept(connection, account_id, stretch.grain, stretch.from_ns, stretch.to_ns, model)
            for bucket, requests in found.items():
                counts[bucket] = counts.get(bucket, 0) + requests
    buckets = tuple((_bound(bucket), counts[bucket]) for bucket in sorted(counts))
    return Latency(sum(counts.values()), percentile(counts, 50), percentile(counts, 95), buckets)


def percentile(counts: Mapping[int, int], percent: int) -> int | None:
    """The end of the bucket with the nearest rank, of which so many took no longer; 120 s stands for all beyond."""
    rank = -(-sum(counts.values()) * percent // 100)
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return _bound(bucket) or BOUNDS_MS[-1]
    return None


def wrong_first_tokens(connection: sa.Connection) -> Iterator[str]:
    """Sentences on kept counts that are not those of the events, for audit.py."""
    for grain in GRAINS_NS:
        for row in connection.execute(_other_counts(grain)):
            yield (
                f"the {grain} that begins at {row.period_start_ns}: account {row.account_id}'s times to the first "
                "token are not those of its requests"
            )


@cache
def _other_counts(grain: str) -> sa.Select[tuple[str, int]]:
    """Whose counts are not those of the events. Built once: that takes as long as a small database's answer."""
    events, table, length_ns = usage_events.c, usage_first_tokens.c, GRAINS_NS[grain]
    bucket = sa.case(
        *((events.ttft_ms <= bound, number) for number, bound in enumerate(BOUNDS_MS)), else_=len(BOUNDS_MS)
    )
    period = (events.started_at_ns // length_ns * length_ns).label("period_start_ns")
    told = sa.select(events.account_id, period, events.model, bucket.label("bucket"), sa.literal(1).label("count"))
    kept = sa.select(table.account_id, table.period_start_ns, table.model, table.bucket, -table.requests)
    both = sa.union_all(
        told.where(events.ttft_ms.is_not(None)), kept.where(table.grain == grain, table.requests != 0)
    ).subquery()
    keys = (both.c.account_id, both.c.period_start_ns, both.c.model, both.c.bucket)
    return (
        sa.select(both.c.account_id, both.c.period_start_ns)
        .group_by(*keys)
        .having(sa.func.sum(both.c["count"]) != 0)
        .limit(100)
    )


def _of_events(
    connection: sa.Connection, account_id: str, from_ns: int, to_ns: int, model: str | None
) -> dict[int, int]:
    events = usage_events.c
    query = (
        sa.select(events.ttft_ms, sa.func.count())
        .where(
            events.account_id == account_id,
            events.started_at_ns >= from_ns,
            events.started_at_ns < to_ns,
            events.ttft_ms.is_not(None),
        )
        .group_by(events.ttft_ms)
    )
    found: dict[int, int] = {}
    for ttft_ms, requests in connection.execute(query if model is None else query.where(events.model == model)):
        found[bucket_of(ttft_ms)] = found.get(bucket_of(ttft_ms), 0) + requests
    return found


def _of_kept(  # noqa: PLR0917 - whose, in what steps, when, of what
    connection: sa.Connection, account_id: str, grain: str, from_ns: int, to_ns: int, model: str | None
) -> dict[int, int]:
    table = usage_first_tokens.c
    query = (
        sa.select(table.bucket, sa.func.sum(table.requests))
        .where(
            table.account_id == account_id,
            table.grain == grain,
            table.period_start_ns >= from_ns,
            table.period_start_ns < to_ns,
        )
        .group_by(table.bucket)
    )
    rows = connection.execute(query if model is None else query.where(table.model == model))
    return {bucket: int(requests) for bucket, requests in rows}


def _bound(bucket: int) -> int | None:
    return BOUNDS_MS[bucket] if bucket < len(BOUNDS_MS) else None
