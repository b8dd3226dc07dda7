"""Sums of usage events by hour and by day, kept in the transaction that posts the events; so they can't disagree.

posting.py adds, summaries.py and budgets.py read, audit.py recomputes. A period is a half-open UTC interval, by when a
request began. There are several views of the same events, so that a question reads few rows: one sum over everything,
one by each dimension, and, by day, one by all of them together. A dimension that a view sums over is "" in its rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import sqlalchemy as sa

from billing.tables import usage_rollups
from tenancy.database import insert_missing

HOUR_NS: Final = 3_600 * 1_000_000_000
DAY_NS: Final = 24 * HOUR_NS
GRAINS_NS: Final = {"hour": HOUR_NS, "day": DAY_NS}
DIMENSIONS: Final = ("key_id", "model", "endpoint", "outcome")
VIEWS: Final[dict[str, frozenset[str]]] = {
    "total": frozenset(),
    "key": frozenset({"key_id"}),
    "model": frozenset({"model"}),
    "endpoint": frozenset({"endpoint"}),
    "outcome": frozenset({"outcome"}),
    "all": frozenset(DIMENSIONS),
}
# By hour all dimensions together would be nearly as many rows as there are events.
ROLLUPS: Final = tuple((grain, view) for grain in GRAINS_NS for view in VIEWS if (grain, view) != ("hour", "all"))
# What is summed of an event, and `requests`, which counts it.
SUMMED: Final = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "cost_nano",
    "neurons_micro",
    "kv_page_ms",
)
_KEYS: Final = ("account_id", "view", "grain", "period_start_ns", *DIMENSIONS)


def view_for(dimensions: Iterable[str]) -> str:
    """The view with the fewest rows that tells these dimensions apart."""
    wanted = frozenset(dimensions)
    return next((name for name, told in VIEWS.items() if told == wanted), "all")


def add_to_rollups(connection: sa.Connection, rows: Sequence[dict[str, Any]]) -> None:
    """rows: of usage_events, new ones. In the caller's write transaction."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        for grain, view in ROLLUPS:
            length_ns = GRAINS_NS[grain]
            start_ns = row["started_at_ns"] // length_ns * length_ns
            told = VIEWS[view]
            dimensions = (row[name] if name in told else "" for name in DIMENSIONS)
            into = sums.setdefault((row["account_id"], view, grain, start_ns, *dimensions), [0] * (1 + len(SUMMED)))
            into[0] += 1
            for index, name in enumerate(SUMMED, start=1):
                into[index] += row[name]
    add_sums(connection, usage_rollups, _KEYS, sums)


def add_sums(
    connection: sa.Connection, table: sa.Table, names: Sequence[str], sums: dict[tuple[Any, ...], list[int]]
) -> None:
    """Add to rows of a table of sums. names: of its key's columns; sums: by key, the requests, and then SUMMED."""
    # In order of key, so that two processes that post at once can't lock each other out.
    keys = sorted(sums)
    none = dict.fromkeys(("requests", *SUMMED), 0)
    insert_missing(connection, table, [dict(zip(names, key, strict=True)) | none for key in keys])
    update = table.update().values({name: table.c[name] + sa.bindparam(f"more_{name}") for name in none})
    for name in names:
        update = update.where(table.c[name] == sa.bindparam(f"of_{name}"))
    connection.execute(
        update,
        [
            {f"of_{name}": value for name, value in zip(names, key, strict=True)}
            | {f"more_{name}": value for name, value in zip(none, sums[key], strict=True)}
            for key in keys
        ],
    )
