"""Rows of usage_events with defaults, for tests that begin at the database: posted as the drain does."""

from typing import Any

from billing.ledger.posting import post_usage
from billing.tables import metadata, prices
from tenancy.database import Database, insert_missing
from tenancy.tables import accounts, api_keys
from tests.billing.builders import ACCOUNT, KEY, MODEL


def post_rows(database: Database, *rows: dict[str, Any]) -> None:
    with database.write() as connection:
        post_usage(connection, rows, posted_at_ns=5_000)


def wipe(database: Database) -> None:
    """Take away everything but prices, for the next example on the same database."""
    with database.write() as connection:
        for table in reversed(metadata.sorted_tables):
            if table is not prices:
                connection.execute(table.delete())


def add_key(database: Database, key_id: str, *, lineage_id: str | None = None, project_id: str | None = None) -> None:
    """A key of ACCOUNT, which is opened if need be."""
    account: dict[str, Any] = {"id": ACCOUNT, "name": "acme", "created_at_ns": 1, "suspended": False}
    key: dict[str, Any] = {
        "id": key_id,
        "account_id": ACCOUNT,
        "name": "k",
        "kind": "inference",
        "key_hash": key_id,
        "hint": "k",
    }
    key |= {"scopes": "ai:run", "created_at_ns": 1, "disabled": False}
    with database.write() as connection:
        insert_missing(connection, accounts, [account])
        connection.execute(api_keys.insert(), key | {"lineage_id": lineage_id, "project_id": project_id})


def event_row(**values: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "id": "request-1",
        "account_id": ACCOUNT,
        "key_id": KEY,
        "model": MODEL,
        "endpoint": "chat",
        "stream": False,
        "outcome": "finished",
        "code": None,
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "completion_tokens": 100,
        "reasoning_tokens": 0,
        "usage_source": "engine",
        "charged": True,
        "cost_nano": 1_010_000,
        "neurons_micro": 91_818_190,
        "price_version": 1,
        "started_at_ns": 1_000,
        "ended_at_ns": 2_000,
        "queued_ms": 0,
        "ttft_ms": 5,
        "replica": None,
        "tier": "standard",
        "end_user": None,
        "tags": None,
        "kv_page_ms": 0,
        "deployment": None,
        "precisions": None,
        "region": None,
    }
    return defaults | values
