"""Recomputes what must be true of the records: costs from tokens, the ledger from events, balances, rollups.

`GET /console/v1/invariants` and `pagegate ledger check` report what it finds; nothing is repaired here. Every check is
a query that finds nothing in a sound database.
"""

from collections.abc import Iterator
from functools import cache
from itertools import chain, islice
from typing import NamedTuple

import sqlalchemy as sa

from billing.attributed_usage import wrong_attributed
from billing.invoices.volumes import wrong_adjustments
from billing.latency import wrong_first_tokens
from billing.ledger.transactions import REVENUE, TransactionKind, usage_source
from billing.price_book import Price, read_prices
from billing.rating import NO_CHARGE, rate
from billing.rollups import DIMENSIONS, GRAINS_NS, ROLLUPS, SUMMED, VIEWS
from billing.tables import ledger_accounts, ledger_entries, ledger_transactions, usage_events, usage_rollups
from billing.usage import TokenUsage
from tenancy.database import Database

_CHECKED_AT_ONCE = 5_000
_VIOLATIONS_TOLD_MAX = 100


def violations(database: Database) -> list[str]:
    """Sentences on what contradicts itself, at most a hundred."""
    with database.read() as connection:
        by_version = {price.version: price for price in read_prices(connection)}
        found = chain(
            (text for row in _all_rated(connection) for text in _contradictions(row, by_version)),
            _unbalanced(connection),
            _wrong_balances(connection),
            _unbooked(connection),
            _overbooked(connection),
            _wrong_reversals(connection),
            wrong_adjustments(connection),
            _wrong_rollups(connection),
            wrong_attributed(connection),
            wrong_first_tokens(connection),
        )
        return list(islice(found, _VIOLATIONS_TOLD_MAX))


class _Rated(NamedTuple):
    """The columns of an event that must agree with each other and with its price."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    charged: bool
    cost_nano: int
    neurons_micro: int
    price_version: int | None
    tier: str


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
    if price is not None and row.tier != price.tier:
        yield f"request {row.id}: was served as {row.tier}, its price is for {price.tier}"
    if price is not None and row.charged and row.prompt_tokens < price.prompt_tokens_from and row.prompt_tokens:
        yield f"request {row.id}: its price is for prompts of at least {price.prompt_tokens_from} tokens"
    expected = NO_CHARGE
    if row.charged and price is not None:
        usage = TokenUsage(row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.reasoning_tokens)
        expected = rate(usage, price)
    if (row.cost_nano, row.neurons_micro) != (expected.cost_nano, expected.neurons_micro):
        yield f"request {row.id}: costs {row.cost_nano} nano-USD, its tokens come to {expected.cost_nano}"


def _unbalanced(connection: sa.Connection) -> Iterator[str]:
    """Every transaction has entries, and they sum to zero."""
    total = sa.func.sum(ledger_entries.c.amount_nano)
    query = (
        sa.select(ledger_transactions.c.source, total.label("total"))
        .outerjoin(ledger_entries, ledger_entries.c.source == ledger_transactions.c.source)
        .group_by(ledger_transactions.c.source)
        .having(sa.or_(total.is_(None), total != 0))
        .limit(_VIOLATIONS_TOLD_MAX)
    )
    for row in connection.execute(query):
        books = "has no entries" if row.total is None else f"sums to {row.total} nano-USD"
        yield f"transaction {row.source}: {books}"


def _wrong_balances(connection: sa.Connection) -> Iterator[str]:
    """A balance is the sum of its entries."""
    total = sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_nano), 0)
    query = (
        sa.select(ledger_accounts.c.id, ledger_accounts.c.posted_nano, total.label("total"))
        .outerjoin(ledger_entries, ledger_entries.c.ledger_account_id == ledger_accounts.c.id)
        .group_by(ledger_accounts.c.id, ledger_accounts.c.posted_nano)
        .having(ledger_accounts.c.posted_nano != total)
        .limit(_VIOLATIONS_TOLD_MAX)
    )
    for row in connection.execute(query):
        yield f"ledger account {row.id}: says {row.posted_nano} nano-USD, its entries come to {row.total}"


def _unbooked(connection: sa.Connection) -> Iterator[str]:
    """Every cost is booked as revenue, once and in full, on its own account."""
    booked = sa.literal(usage_source("")) + usage_events.c.id
    query = (
        sa.select(usage_events.c.id, usage_events.c.cost_nano, ledger_entries.c.amount_nano)
        .outerjoin(ledger_transactions, ledger_transactions.c.source == booked)
        .outerjoin(
            ledger_entries, sa.and_(ledger_entries.c.source == booked, ledger_entries.c.ledger_account_id == REVENUE.id)
        )
        .where(
            sa.or_(
                usage_events.c.cost_nano != sa.func.coalesce(ledger_entries.c.amount_nano, 0),
                ledger_transactions.c.account_id != usage_events.c.account_id,
            )
        )
        .limit(_VIOLATIONS_TOLD_MAX)
    )
    for row in connection.execute(query):
        booked_nano = "nothing" if row.amount_nano is None else f"{row.amount_nano} nano-USD"
        yield f"request {row.id}: costs {row.cost_nano} nano-USD, the ledger books {booked_nano} for its account"


def _overbooked(connection: sa.Connection) -> Iterator[str]:
    """No usage is booked that no event tells of."""
    request_id = sa.func.substr(ledger_transactions.c.source, len(usage_source("")) + 1)
    query = (
        sa.select(ledger_transactions.c.source)
        .outerjoin(usage_events, usage_events.c.id == request_id)
        .where(ledger_transactions.c.kind == TransactionKind.USAGE.value, usage_events.c.id.is_(None))
        .limit(_VIOLATIONS_TOLD_MAX)
    )
    for source in connection.scalars(query):
        yield f"transaction {source}: there is no such request"


def _wrong_reversals(connection: sa.Connection) -> Iterator[str]:
    """A reversal books the opposite of what it takes back, entry by entry."""
    original, opposite = ledger_entries.alias("original"), ledger_entries.alias("opposite")
    together = original.c.amount_nano + sa.func.coalesce(opposite.c.amount_nano, 0)
    query = (
        sa.select(ledger_transactions.c.source)
        .distinct()
        .join(original, original.c.source == ledger_transactions.c.reverses)
        .outerjoin(
            opposite,
            sa.and_(
                opposite.c.source == ledger_transactions.c.source,
                opposite.c.ledger_account_id == original.c.ledger_account_id,
            ),
        )
        .where(together != 0)
        .limit(_VIOLATIONS_TOLD_MAX)
    )
    for source in connection.scalars(query):
        yield f"transaction {source}: is not the opposite of what it reverses"


def _wrong_rollups(connection: sa.Connection) -> Iterator[str]:
    """In every view, at every grain, the sums are those of the events."""
    for grain, view in ROLLUPS:
        for row in connection.execute(_other_sums(grain, view)):
            yield (
                f"the {grain} that begins at {row.period_start_ns}: account {row.account_id}'s sums by {view} "
                "are not those of its requests"
            )


@cache
def _other_sums(grain: str, view: str) -> sa.Select[tuple[str, int]]:
    """Whose sums are not those of the events. Built once: that takes as long as a small database's answer."""
    length_ns, told = GRAINS_NS[grain], VIEWS[view]
    from_events = sa.select(
        usage_events.c.account_id,
        (usage_events.c.started_at_ns // length_ns * length_ns).label("period_start_ns"),
        *(usage_events.c[name] if name in told else sa.literal("").label(name) for name in DIMENSIONS),
        sa.literal(1).label("requests"),
        *(usage_events.c[name] for name in SUMMED),
    )
    from_rollups = sa.select(
        usage_rollups.c.account_id,
        usage_rollups.c.period_start_ns,
        *(usage_rollups.c[name] for name in DIMENSIONS),
        *((-usage_rollups.c[name]).label(name) for name in ("requests", *SUMMED)),
    ).where(usage_rollups.c.grain == grain, usage_rollups.c.view == view)
    both = sa.union_all(from_events, from_rollups).subquery()
    keys = [both.c[name] for name in ("account_id", "period_start_ns", *DIMENSIONS)]
    return (
        sa.select(both.c.account_id, both.c.period_start_ns)
        .group_by(*keys)
        .having(sa.or_(*(sa.func.sum(both.c[name]) != 0 for name in ("requests", *SUMMED))))
        .limit(_VIOLATIONS_TOLD_MAX)
    )
