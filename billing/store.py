"""Queries over usage events, and the check that they agree with the price rows. The console and the command line read.

Synchronous: callers on an event loop run them through `Database.call`. Every query of an account takes its id first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from billing.attributed_usage import attributed_series, is_attributed, summarise_attributed
from billing.audit import violations
from billing.errors import UsageNotFound
from billing.latency import Latency, latency_of
from billing.summaries import (
    EVERYTHING,
    GroupBy,
    SeriesPoint,
    UsageFilter,
    UsageSummary,
    matching,
    series,
    summarise,
)
from billing.tables import usage_events
from tenancy.database import Database

_PAGE_MAX = 1_000


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """One row: a request that ended. price_version is None where it was refused before a price was known."""

    id: str
    account_id: str
    key_id: str
    model: str
    endpoint: str
    stream: bool
    outcome: str
    code: str | None
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    usage_source: str
    charged: bool
    cost_nano: int
    neurons_micro: int
    price_version: int | None
    started_at_ns: int
    ended_at_ns: int
    queued_ms: int
    ttft_ms: int | None
    replica: str | None
    tier: str
    end_user: str | None
    tags: str | None
    kv_page_ms: int
    deployment: str | None
    precisions: str | None
    region: str | None


class UsageStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def usage_summary(
        self,
        account_id: str,
        from_ns: int,
        to_ns: int,
        group_by: GroupBy = GroupBy.NONE,
        only: UsageFilter = EVERYTHING,
    ) -> UsageSummary:
        """Sums of what began in [from_ns, to_ns), and the same by group; groups add up to the totals."""
        if is_attributed(group_by, only):
            return summarise_attributed(self._database, account_id, from_ns, to_ns, group_by, only)
        return summarise(self._database, account_id, from_ns, to_ns, group_by, only)

    def usage_series(  # noqa: PLR0917 - whose, when, in what steps, by what, of what
        self,
        account_id: str,
        from_ns: int,
        to_ns: int,
        period: GroupBy,
        split_by: GroupBy,
        keys: Sequence[str] = (),
        only: UsageFilter = EVERYTHING,
    ) -> list[SeriesPoint]:
        """The same sums by period; in each, the named groups, and all others together under the key None."""
        if is_attributed(split_by, only):
            assert period is GroupBy.DAY, "sums by tag and end user are kept by day"
            return attributed_series(self._database, account_id, from_ns, to_ns, split_by, keys, only)
        return series(self._database, account_id, from_ns, to_ns, period, split_by, keys, only)

    def latency(self, account_id: str, from_ns: int, to_ns: int, model: str | None = None) -> Latency:
        """Of the newest ten thousand answers, at most, that began in [from_ns, to_ns)."""
        return latency_of(self._database, account_id, from_ns, to_ns, model)

    def request_record(self, account_id: str, request_id: str) -> UsageEvent:
        """Raises UsageNotFound for an unknown request and for another account's alike."""
        query = sa.select(usage_events).where(
            usage_events.c.account_id == account_id,
            usage_events.c.id == request_id,
        )
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            raise UsageNotFound("There is no record of this request in this account.")
        return UsageEvent(**row)

    def recent_requests(
        self,
        account_id: str,
        limit: int = 50,
        before: tuple[int, str] | None = None,
        only: UsageFilter = EVERYTHING,
        since_ns: int = 0,
    ) -> list[UsageEvent]:
        """Newest first. before: (started_at_ns, id) of the last one seen, for the page behind it.

        since_ns: bounds how far back a filter that matches little looks.
        """
        query = sa.select(usage_events).where(
            usage_events.c.account_id == account_id,
            usage_events.c.started_at_ns >= since_ns,
            *matching(usage_events, account_id, only),
        )
        order = (usage_events.c.started_at_ns, usage_events.c.id)
        if before is not None:
            query = query.where(sa.tuple_(*order) < sa.tuple_(*before))
        query = query.order_by(*(column.desc() for column in order)).limit(min(max(limit, 1), _PAGE_MAX))
        with self._database.read() as connection:
            return [UsageEvent(**row) for row in connection.execute(query).mappings()]

    def requests_between(self, account_id: str, from_ns: int, to_ns: int) -> Iterator[UsageEvent]:
        """Every request that began in [from_ns, to_ns), oldest first. A page is read at a time."""
        order = (usage_events.c.started_at_ns, usage_events.c.id)
        last: tuple[int, str] = (from_ns, "")
        while True:
            query = (
                sa.select(usage_events)
                .where(
                    usage_events.c.account_id == account_id,
                    sa.tuple_(*order) > sa.tuple_(*last),
                    usage_events.c.started_at_ns < to_ns,
                )
                .order_by(*order)
                .limit(_PAGE_MAX)
            )
            with self._database.read() as connection:
                page = [UsageEvent(**row) for row in connection.execute(query).mappings()]
            yield from page
            if len(page) < _PAGE_MAX:
                return
            last = (page[-1].started_at_ns, page[-1].id)

    def violations(self) -> list[str]:
        """Sentences on what contradicts itself, at most a hundred: events, their prices, the ledger and the rollups."""
        return violations(self._database)
