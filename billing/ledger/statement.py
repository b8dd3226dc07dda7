"""What was booked on one account, newest first: for the console and the command line."""

from dataclasses import dataclass

import sqlalchemy as sa

from billing.tables import ledger_entries, ledger_transactions
from tenancy.database import Database

_PAGE_MAX = 1_000


@dataclass(frozen=True, slots=True)
class StatementLine:
    """One transaction. entries: (ledger account, amount in nano-USD), in order of account."""

    source: str
    kind: str
    occurred_at_ns: int
    posted_at_ns: int
    reverses: str | None
    memo: str | None
    entries: tuple[tuple[str, int], ...]


def read_statement(
    database: Database, account_id: str, limit: int = 50, before: tuple[int, str] | None = None
) -> list[StatementLine]:
    """before: (posted_at_ns, source) of the last one seen, for the page behind it."""
    order = (ledger_transactions.c.posted_at_ns, ledger_transactions.c.source)
    query = sa.select(ledger_transactions).where(ledger_transactions.c.account_id == account_id)
    if before is not None:
        query = query.where(sa.tuple_(*order) < sa.tuple_(*before))
    query = query.order_by(*(column.desc() for column in order)).limit(min(max(limit, 1), _PAGE_MAX))
    with database.read() as connection:
        rows = connection.execute(query).mappings().all()
        entries: dict[str, list[tuple[str, int]]] = {row["source"]: [] for row in rows}
        booked = (
            sa.select(ledger_entries)
            .where(ledger_entries.c.source.in_(entries))
            .order_by(ledger_entries.c.source, ledger_entries.c.ledger_account_id)
        )
        for entry in connection.execute(booked):
            entries[entry.source].append((entry.ledger_account_id, entry.amount_nano))
    return [
        StatementLine(
            source=row["source"],
            kind=row["kind"],
            occurred_at_ns=row["occurred_at_ns"],
            posted_at_ns=row["posted_at_ns"],
            reverses=row["reverses"],
            memo=row["memo"],
            entries=tuple(entries[row["source"]]),
        )
        for row in rows
    ]
