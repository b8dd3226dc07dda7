"""Posts ended requests: the event, its ledger transaction and the rollups, in one SQL transaction. The drain calls it.

A request whose event is there already is left alone, so that a batch may be posted any number of times.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from billing.attributed_usage import add_attributed
from billing.latency import add_first_tokens
from billing.ledger.payers import Payer, read_payers
from billing.ledger.transactions import REVENUE, Entry, Transaction, TransactionKind, post, usage_source
from billing.rollups import add_to_rollups
from billing.tables import usage_events
from tenancy.database import insert_missing_ids


def post_usage(connection: sa.Connection, rows: Sequence[dict[str, Any]], posted_at_ns: int) -> list[dict[str, Any]]:
    """rows: of usage_events. Runs in the caller's write transaction; returns those that were new."""
    by_id: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_id.setdefault(row["id"], row)  # a record that was written twice counts once: they are equal
    if not by_id:
        return []
    # In order of id, and told by the insert itself: another that posts the same ones in this moment waits here for us.
    inserted = insert_missing_ids(connection, usage_events, [by_id[one] for one in sorted(by_id)])
    fresh = [row for row in by_id.values() if row["id"] in inserted]
    if not fresh:
        return []
    add_to_rollups(connection, fresh)
    add_attributed(connection, fresh)
    add_first_tokens(connection, fresh)
    costly = [row for row in fresh if row["cost_nano"]]
    payers = read_payers(connection, {row["account_id"] for row in costly})
    post(connection, [_transaction(row, payers[row["account_id"]]) for row in costly], posted_at_ns)
    return fresh


def _transaction(row: dict[str, Any], payer: Payer) -> Transaction:
    cost_nano = row["cost_nano"]
    return Transaction(
        source=usage_source(row["id"]),
        kind=TransactionKind.USAGE,
        account_id=row["account_id"],
        occurred_at_ns=row["started_at_ns"],
        entries=(*payer.pay(cost_nano, row["started_at_ns"]), Entry(REVENUE, cost_nano)),
    )
