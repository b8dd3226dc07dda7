"""Posts ended requests: the event, its ledger transaction and the rollups, in one SQL transaction. The drain calls it.

A request whose event is there already is left alone, so that a batch may be posted any number of times.
"""

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from billing.ledger.payers import Payer, read_payers
from billing.ledger.transactions import REVENUE, Entry, Transaction, TransactionKind, post, usage_source
from billing.rollups import add_to_rollups
from billing.tables import usage_events

_IDS_AT_ONCE = 500  # databases bound the parameters of a statement


def post_usage(connection: sa.Connection, rows: Sequence[dict[str, Any]], posted_at_ns: int) -> int:
    """rows: of usage_events. Runs in the caller's write transaction; returns how many were new."""
    by_id: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_id.setdefault(row["id"], row)  # a record that was written twice counts once: they are equal
    for known in _known_ids(connection, by_id):
        del by_id[known]
    if not by_id:
        return 0
    fresh = list(by_id.values())
    connection.execute(usage_events.insert(), fresh)
    add_to_rollups(connection, fresh)
    costly = [row for row in fresh if row["cost_nano"]]
    payers = read_payers(connection, {row["account_id"] for row in costly})
    post(connection, [_transaction(row, payers[row["account_id"]]) for row in costly], posted_at_ns)
    return len(fresh)


def _known_ids(connection: sa.Connection, ids: Collection[str]) -> list[str]:
    known: list[str] = []
    listed = list(ids)
    for start in range(0, len(listed), _IDS_AT_ONCE):
        some = listed[start : start + _IDS_AT_ONCE]
        known += connection.scalars(sa.select(usage_events.c.id).where(usage_events.c.id.in_(some)))
    return known


def _transaction(row: dict[str, Any], payer: Payer) -> Transaction:
    cost_nano = row["cost_nano"]
    return Transaction(
        source=usage_source(row["id"]),
        kind=TransactionKind.USAGE,
        account_id=row["account_id"],
        occurred_at_ns=row["started_at_ns"],
        entries=(*payer.pay(cost_nano, row["started_at_ns"]), Entry(REVENUE, cost_nano)),
    )
