"""What a month's volume makes its tokens cost more or less than they were charged. close.py books it, audit.py checks.

A volume is counted over the requests that began in a month, were charged, and were not taken back. What was booked for
a month when it closed is corrected when later closes know more of it: usage that came late, refunds. So what is booked
for a month, over all closes, is always what its whole volume comes to, rounded once.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import sqlalchemy as sa

from billing.ledger.payers import read_payers
from billing.ledger.periods import month_bounds, month_of
from billing.ledger.transactions import REVENUE, Entry, Transaction, TransactionKind, post, usage_source
from billing.ledger.wallet import raise_revision
from billing.money import TOKENS_PER_PRICE, round_half_up
from billing.price_book import Place, Price, place_of, read_prices
from billing.rollups import DAY_NS
from billing.tables import (
    ledger_entries,
    ledger_periods,
    ledger_transactions,
    prices,
    usage_events,
    volume_adjustments,
)
from billing.volume_prices import TokenClass, VolumePrice, in_force, read_volume_prices

_SUMMED: Final = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Of one class at one place. tokens: the volume of the usage month. amount_nano: what is booked now."""

    usage_month: str
    schedule: VolumePrice
    tokens: int
    amount_nano: int


@dataclass(slots=True)
class _Volume:
    """tokens of one class, and the numerator that they were charged at."""

    tokens: int = 0
    charged: int = 0


@dataclass(frozen=True, slots=True)
class _Books:
    """Every schedule, and every price by its version."""

    schedules: Sequence[VolumePrice]
    by_version: Mapping[int, Price]

    @classmethod
    def read(cls, connection: sa.Connection) -> Self:
        schedules = read_volume_prices(connection)
        return cls(schedules, {price.version: price for price in read_prices(connection)} if schedules else {})


def volume_source(account_id: str, month: str) -> str:
    return f"volume:{account_id}:{month}"


def find_adjustments(connection: sa.Connection, account_id: str, month: str) -> list[Adjustment]:
    """What is to be booked when this closed month is invoiced; nothing is written."""
    books = _Books.read(connection)
    if not books.schedules:
        return []
    found = []
    for usage_month in _months_of_facts(connection, account_id, month):
        booked = _booked(connection, account_id, usage_month, before=month)
        for schedule, tokens, total_nano in _totals(connection, books, account_id, usage_month, through=month):
            more_nano = total_nano - booked.pop(schedule.version, 0)
            if more_nano:
                found.append(Adjustment(usage_month, schedule, tokens, more_nano))
    return found


def book_adjustments(
    connection: sa.Connection, account_id: str, month: str, adjustments: Sequence[Adjustment], posted_at_ns: int
) -> tuple[Entry, ...]:
    """Book them as one transaction of the closed month, and return its entries; none if they come to nothing.

    A discount on what a prepaid account has used goes to its wallet. In the caller's write transaction.
    """
    if not adjustments:
        return ()
    connection.execute(
        volume_adjustments.insert(),
        [
            {
                "account_id": account_id,
                "month": month,
                "usage_month": one.usage_month,
                "volume_version": one.schedule.version,
                "tokens": one.tokens,
                "amount_nano": one.amount_nano,
            }
            for one in adjustments
        ],
    )
    total_nano = sum(one.amount_nano for one in adjustments)
    if not total_nano:
        return ()
    raise_revision(connection, account_id)
    payer = read_payers(connection, [account_id])[account_id]
    occurred_at_ns = month_bounds(month)[1] - 1
    paid = payer.pay(total_nano, occurred_at_ns) if total_nano > 0 else (Entry(payer.rest, -total_nano),)
    transaction = Transaction(
        source=volume_source(account_id, month),
        kind=TransactionKind.ADJUSTMENT,
        account_id=account_id,
        occurred_at_ns=occurred_at_ns,
        entries=(*paid, Entry(REVENUE, total_nano)),
        memo="prices by volume",
        month=month,
    )
    post(connection, [transaction], posted_at_ns)
    return transaction.entries


def wrong_adjustments(connection: sa.Connection) -> Iterator[str]:
    """Sentences on adjustments that are not what the volume of sealed months comes to, or are booked otherwise."""
    yield from _misbooked(connection)
    books = _Books.read(connection)
    if not books.schedules:
        return
    query = sa.select(ledger_periods.c.account_id, ledger_periods.c.month).where(ledger_periods.c.digest.is_not(None))
    sealed: defaultdict[str, list[str]] = defaultdict(list)
    for row in connection.execute(query.order_by(ledger_periods.c.account_id, ledger_periods.c.month)):
        sealed[row.account_id].append(row.month)
    for account_id, months in sealed.items():
        for usage_month in months:
            booked = _booked(connection, account_id, usage_month)
            for schedule, _, total_nano in _totals(connection, books, account_id, usage_month, through=months[-1]):
                was_nano = booked.pop(schedule.version, 0)
                if was_nano != total_nano:
                    yield (
                        f"account {account_id}: {was_nano} nano-USD are booked for the volume of "
                        f"{schedule.token_class} tokens of {schedule.place.model} in {usage_month}, "
                        f"it comes to {total_nano}"
                    )
            for version, was_nano in booked.items():
                if was_nano:
                    yield (
                        f"account {account_id}: {was_nano} nano-USD are booked for {usage_month} "
                        f"by volume price {version}, under which it used nothing"
                    )


def _months_of_facts(connection: sa.Connection, account_id: str, month: str) -> list[str]:
    """The months in which requests began that were charged or taken back in the closed month, oldest first."""
    reversals, original = ledger_transactions, ledger_transactions.alias("original")
    day = (ledger_transactions.c.occurred_at_ns // DAY_NS).label("day")
    charged = sa.select(day).where(
        ledger_transactions.c.account_id == account_id,
        ledger_transactions.c.month == month,
        ledger_transactions.c.kind == TransactionKind.USAGE.value,
    )
    taken_back = (
        sa.select((original.c.occurred_at_ns // DAY_NS).label("day"))
        .join_from(reversals, original, original.c.source == reversals.c.reverses)
        .where(
            reversals.c.account_id == account_id,
            reversals.c.month == month,
            original.c.kind == TransactionKind.USAGE.value,
        )
    )
    days = connection.scalars(sa.union(charged, taken_back))
    return sorted({month_of(one * DAY_NS) for one in days})


def _totals(
    connection: sa.Connection, books: _Books, account_id: str, usage_month: str, *, through: str
) -> list[tuple[VolumePrice, int, int]]:
    """(schedule, tokens, adjustment in nano-USD) of a month's whole volume, as far as it was booked by `through`."""
    current = in_force(books.schedules, usage_month)
    if not current:
        return []
    volumes: defaultdict[tuple[Place, TokenClass], _Volume] = defaultdict(_Volume)
    for row in connection.execute(_used(account_id, usage_month, through)).mappings():
        price = books.by_version[row["version"]]
        for token_class, tokens, nano_per_m in _classes(row, price, current):
            volume = volumes[place_of(price), token_class]
            volume.tokens += tokens
            volume.charged += tokens * nano_per_m
    # Everything of a month may have been taken back: then what was booked for it has to go, too.
    return [
        (
            schedule,
            volumes[where].tokens,
            round_half_up(schedule.numerator(volumes[where].tokens) - volumes[where].charged, TOKENS_PER_PRICE),
        )
        for where, schedule in sorted(current.items(), key=lambda item: item[0])
    ]


def _used(account_id: str, usage_month: str, through: str) -> sa.Select[Any]:
    """Sums of a month's charged requests by price, without those that were taken back by the end of `through`."""
    start_ns, end_ns = month_bounds(usage_month)
    booked, reversals = ledger_transactions, ledger_transactions.alias("reversals")
    return (
        sa.select(
            prices.c.version,
            *(sa.cast(sa.func.sum(usage_events.c[name]), sa.BigInteger).label(name) for name in _SUMMED),
        )
        .join_from(usage_events, booked, booked.c.source == sa.literal(usage_source("")) + usage_events.c.id)
        .join(prices, prices.c.version == usage_events.c.price_version)
        .outerjoin(reversals, sa.and_(reversals.c.reverses == booked.c.source, reversals.c.month <= through))
        .where(
            usage_events.c.account_id == account_id,
            usage_events.c.started_at_ns >= start_ns,
            usage_events.c.started_at_ns < end_ns,
            booked.c.month <= through,
            reversals.c.source.is_(None),
        )
        .group_by(prices.c.version)
    )


def _classes(
    row: sa.RowMapping, price: Price, current: Mapping[tuple[Place, TokenClass], VolumePrice]
) -> Iterator[tuple[TokenClass, int, int]]:
    """(class, tokens, nano-USD per million they were charged at). What nothing prices apart counts as its whole."""

    def own_or(token_class: TokenClass, whole: TokenClass, apart: int | None) -> TokenClass:
        return token_class if apart is not None or (place_of(price), token_class) in current else whole

    cached = own_or(TokenClass.CACHED_INPUT, TokenClass.INPUT, price.cached_input_nano_per_m)
    reasoning = own_or(TokenClass.REASONING, TokenClass.OUTPUT, price.reasoning_nano_per_m)
    yield TokenClass.INPUT, row["prompt_tokens"] - row["cached_tokens"], price.input_nano_per_m
    yield cached, row["cached_tokens"], price.cached_nano
    yield TokenClass.OUTPUT, row["completion_tokens"] - row["reasoning_tokens"], price.output_nano_per_m
    yield reasoning, row["reasoning_tokens"], price.reasoning_nano


def _booked(
    connection: sa.Connection, account_id: str, usage_month: str, *, before: str | None = None
) -> dict[int, int]:
    """What closes (before one) have booked for a month, by version of the schedule."""
    query = sa.select(volume_adjustments.c.volume_version, sa.func.sum(volume_adjustments.c.amount_nano)).where(
        volume_adjustments.c.account_id == account_id, volume_adjustments.c.usage_month == usage_month
    )
    if before is not None:
        query = query.where(volume_adjustments.c.month < before)
    rows = connection.execute(query.group_by(volume_adjustments.c.volume_version))
    return {version: int(amount_nano) for version, amount_nano in rows}


def _misbooked(connection: sa.Connection) -> Iterator[str]:
    """The ledger's revenue of each close's adjustments is their sum."""
    source = sa.literal(volume_source("", "")[:-1]) + volume_adjustments.c.account_id + ":" + volume_adjustments.c.month
    adjusted = sa.select(source.label("source"), volume_adjustments.c.amount_nano)
    posted = (
        sa.select(ledger_entries.c.source, (-ledger_entries.c.amount_nano).label("amount_nano"))
        .join(ledger_transactions, ledger_transactions.c.source == ledger_entries.c.source)
        .where(
            ledger_transactions.c.kind == TransactionKind.ADJUSTMENT.value,
            ledger_entries.c.ledger_account_id == REVENUE.id,
        )
    )
    both = sa.union_all(adjusted, posted).subquery()
    off = sa.func.sum(both.c.amount_nano)
    for row in connection.execute(sa.select(both.c.source, off.label("off")).group_by(both.c.source).having(off != 0)):
        yield f"transaction {row.source}: is not the sum of its adjustments, by {row.off} nano-USD"
