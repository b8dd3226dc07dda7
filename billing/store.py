"""Queries over usage events, and the check that they agree with the price rows. The console and the command line read.

Synchronous: callers on an event loop run them through `Database.call`. Every query of an account takes its id first.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import sqlalchemy as sa

from billing.errors import UsageNotFound
from billing.price_book import Price, read_prices
from billing.rating import NO_CHARGE, rate
from billing.tables import usage_events
from billing.usage import TokenUsage
from tenancy.database import Database

DAY_NS = 86_400 * 1_000_000_000
_GROUPS_MAX = 10_000
_PAGE_MAX = 1_000
_CHECKED_AT_ONCE = 5_000
_VIOLATIONS_TOLD_MAX = 100
_IDS_AT_ONCE = 500  # databases bound the parameters of a statement


class GroupBy(StrEnum):
    NONE = "none"
    MODEL = "model"
    DAY = "day"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class UsageTotals:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cost_nano: int = 0
    neurons_micro: int = 0


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """key: the model, the key id, or the UTC day as days since 1970."""

    key: str
    totals: UsageTotals


@dataclass(frozen=True, slots=True)
class UsageSummary:
    totals: UsageTotals
    groups: tuple[UsageGroup, ...]


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


class UsageStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def usage_summary(
        self,
        account_id: str,
        from_ns: int,
        to_ns: int,
        group_by: GroupBy = GroupBy.NONE,
    ) -> UsageSummary:
        """Sums of what began in [from_ns, to_ns), and the same by group; groups add up to the totals."""
        key: sa.ColumnElement[Any] = {
            GroupBy.NONE: sa.literal(""),
            GroupBy.MODEL: usage_events.c.model,
            GroupBy.DAY: usage_events.c.started_at_ns // DAY_NS,
            GroupBy.KEY: usage_events.c.key_id,
        }[group_by]
        query = (
            sa.select(key.label("group_key"), *_SUMS)
            .where(
                usage_events.c.account_id == account_id,
                usage_events.c.started_at_ns >= from_ns,
                usage_events.c.started_at_ns < to_ns,
            )
            .group_by(sa.text("group_key"))
            .order_by(sa.text("group_key"))
            .limit(_GROUPS_MAX)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        groups = tuple(UsageGroup(str(row[0]), UsageTotals(*map(int, row[1:]))) for row in rows)
        return UsageSummary(_total(groups), () if group_by is GroupBy.NONE else groups)

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
    ) -> list[UsageEvent]:
        """Newest first. before: (started_at_ns, id) of the last one seen, for the page behind it."""
        query = sa.select(usage_events).where(usage_events.c.account_id == account_id)
        order = (usage_events.c.started_at_ns, usage_events.c.id)
        if before is not None:
            query = query.where(sa.tuple_(*order) < sa.tuple_(*before))
        query = query.order_by(*(column.desc() for column in order)).limit(min(max(limit, 1), _PAGE_MAX))
        with self._database.read() as connection:
            return [UsageEvent(**row) for row in connection.execute(query).mappings()]

    def spent_nano(self, account_id: str, *, without: Collection[str] = ()) -> int:
        """What the account was charged in all, leaving out the requests with these ids."""
        cost = sa.select(sa.func.coalesce(sa.func.sum(usage_events.c.cost_nano), 0)).where(
            usage_events.c.account_id == account_id,
        )
        with self._database.read() as connection:
            spent = int(connection.scalar(cost) or 0)
            ids = iter(without)
            while some := list(islice(ids, _IDS_AT_ONCE)):
                spent -= int(connection.scalar(cost.where(usage_events.c.id.in_(some))) or 0)
        return spent

    def violations(self) -> list[str]:
        """Sentences on what contradicts itself, at most a hundred: every row is priced again from its own tokens."""
        with self._database.read() as connection:
            by_version = {price.version: price for price in read_prices(connection)}
            found = (text for row in _all_rated(connection) for text in _contradictions(row, by_version))
            return list(islice(found, _VIOLATIONS_TOLD_MAX))


_SUMS = (
    sa.func.count(),
    *(
        sa.func.sum(column)
        for column in (
            usage_events.c.prompt_tokens,
            usage_events.c.cached_tokens,
            usage_events.c.completion_tokens,
            usage_events.c.reasoning_tokens,
            usage_events.c.cost_nano,
            usage_events.c.neurons_micro,
        )
    ),
)


def _total(groups: tuple[UsageGroup, ...]) -> UsageTotals:
    each = [group.totals for group in groups]
    return UsageTotals(
        requests=sum(totals.requests for totals in each),
        prompt_tokens=sum(totals.prompt_tokens for totals in each),
        cached_tokens=sum(totals.cached_tokens for totals in each),
        completion_tokens=sum(totals.completion_tokens for totals in each),
        reasoning_tokens=sum(totals.reasoning_tokens for totals in each),
        cost_nano=sum(totals.cost_nano for totals in each),
        neurons_micro=sum(totals.neurons_micro for totals in each),
    )


class _Rated(NamedTuple):
    """The columns of an event that must agree with each other and with its price."""

    id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    charged: bool
    cost_nano: int
    neurons_micro: int
    price_version: int | None


def _all_rated(connection: sa.Connection) -> Iterator[_Rated]:
    columns = [usage_events.c[name] for name in _Rated._fields]
    last = ""
    while True:
        query = sa.select(*columns).where(usage_events.c.id > last).order_by(usage_events.c.id).limit(_CHECKED_AT_ONCE)
        rows = connection.execute(query).all()
        if not rows:
            return
        for row in rows:
            yield _Rated._make(row)
        last = rows[-1].id


def _contradictions(row: _Rated, by_version: dict[int, Price]) -> Iterator[str]:
    if not 0 <= row.cached_tokens <= row.prompt_tokens:
        yield f"request {row.id}: cached tokens are no part of its prompt tokens"
        return
    if not 0 <= row.reasoning_tokens <= row.completion_tokens:
        yield f"request {row.id}: reasoning tokens are no part of its completion tokens"
        return
    price = None if row.price_version is None else by_version.get(row.price_version)
    if price is None and row.price_version is not None:
        yield f"request {row.id}: there is no price of version {row.price_version}"
    expected = NO_CHARGE
    if row.charged and price is not None:
        usage = TokenUsage(row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.reasoning_tokens)
        expected = rate(usage, price)
    if (row.cost_nano, row.neurons_micro) != (expected.cost_nano, expected.neurons_micro):
        yield f"request {row.id}: costs {row.cost_nano} nano-USD, its tokens come to {expected.cost_nano}"
    if price is not None and price.model != row.model:
        yield f"request {row.id}: is priced as {price.model} and not as {row.model}"
