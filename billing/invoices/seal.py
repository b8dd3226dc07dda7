"""The seal of a closed month: one digest over every booking in it, its request's tokens, and the seal before it.

close.py sets it; `pagegate ledger prove` computes it again, so that a month that was changed afterwards is found, by
whatever means it was changed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from billing.ledger.transactions import usage_source
from billing.tables import ledger_entries, ledger_periods, ledger_transactions, usage_events
from tenancy.database import Database

_READ_AT_ONCE = 5_000
_BOOKED = ("source", "kind", "reverses", "memo", "occurred_at_ns", "posted_at_ns")
_USED = (
    *("key_id", "model", "endpoint", "outcome", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("reasoning_tokens", "usage_source", "charged", "cost_nano", "price_version", "started_at_ns", "ended_at_ns"),
)


@dataclass(frozen=True, slots=True)
class Seal:
    """transactions: how many bookings it covers. digest: SHA-256, hexadecimal."""

    transactions: int
    digest: str


@dataclass(frozen=True, slots=True)
class Proof:
    """A closed month, the seal that was set, and what its bookings come to now."""

    account_id: str
    month: str
    sealed: Seal
    now: Seal

    @property
    def holds(self) -> bool:
        return self.sealed == self.now


def seal_month(database: Database, account_id: str, month: str) -> None:
    """Set the seal of a closed month whose invoice is written. Setting it again sets the same."""
    seal = compute_seal(database, account_id, month)
    with database.write() as connection:
        connection.execute(
            ledger_periods.update()
            .where(ledger_periods.c.account_id == account_id, ledger_periods.c.month == month)
            .values(transactions=seal.transactions, digest=seal.digest)
        )


def prove_months(database: Database, month: str | None = None, account_id: str | None = None) -> Iterator[Proof]:
    """Every sealed month, or the named ones, beside what its bookings come to now; in order of account and month."""
    query = sa.select(ledger_periods).where(ledger_periods.c.digest.is_not(None))
    if month is not None:
        query = query.where(ledger_periods.c.month == month)
    if account_id is not None:
        query = query.where(ledger_periods.c.account_id == account_id)
    with database.read() as connection:
        rows = connection.execute(query.order_by(ledger_periods.c.account_id, ledger_periods.c.month)).all()
    for row in rows:
        now = compute_seal(database, row.account_id, row.month)
        yield Proof(row.account_id, row.month, Seal(row.transactions, row.digest), now)


def compute_seal(database: Database, account_id: str, month: str) -> Seal:
    """Reads a few thousand rows at a time: a month may have millions of bookings."""
    with database.read() as connection:
        digest = hashlib.sha256(f"{account_id} {month} {_seal_before(connection, account_id, month)}".encode())
        transactions, last = 0, ""
        for row in connection.execute(_booked_rows(connection, account_id, month)):
            digest.update(repr(tuple(row)).encode())
            transactions += row.source != last
            last = row.source
    return Seal(transactions, digest.hexdigest())


def _seal_before(connection: sa.Connection, account_id: str, month: str) -> str:
    query = (
        sa.select(ledger_periods.c.digest)
        .where(ledger_periods.c.account_id == account_id, ledger_periods.c.month < month)
        .order_by(ledger_periods.c.month.desc())
        .limit(1)
    )
    return connection.scalar(query) or ""


def _booked_rows(connection: sa.Connection, account_id: str, month: str) -> sa.Select[Any]:
    """A row for each entry, in the order of their bytes on every database, so that a seal outlives a move."""
    bytewise = "C" if connection.dialect.name == "postgresql" else "BINARY"
    columns = [ledger_transactions.c[name] for name in _BOOKED]
    used = [usage_events.c[name].label(f"used_{name}") for name in _USED]
    return (
        sa.select(*columns, *used, ledger_entries.c.ledger_account_id, ledger_entries.c.amount_nano)
        .outerjoin(usage_events, ledger_transactions.c.source == sa.literal(usage_source("")) + usage_events.c.id)
        .join(ledger_entries, ledger_entries.c.source == ledger_transactions.c.source)
        .where(ledger_transactions.c.account_id == account_id, ledger_transactions.c.month == month)
        .order_by(
            sa.collate(ledger_transactions.c.source, bytewise),
            sa.collate(ledger_entries.c.ledger_account_id, bytewise),
        )
        .execution_options(yield_per=_READ_AT_ONCE)
    )
