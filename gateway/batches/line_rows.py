"""Rows of lines, in the transactions of store.py: how they are added, found, ended by the hundred, and left to others.

A line belongs to whoever moved it from waiting to running.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
import uuid_utils

from gateway.batches.batch import Batch, Line, LineState, NewLine
from gateway.batches.tables import batch_lines, batches
from tenancy.database import insert_missing

# Lines that one transaction ends or deletes: it holds the writer for a few milliseconds.
LINES_AT_ONCE: Final = 500
# Answers that are read at once: no more than a few megabytes of them, since one may be megabytes itself.
ANSWERS_AT_ONCE: Final = 200
ANSWERS_BYTES_AT_ONCE: Final = 4 << 20
LINE: Final = tuple(batch_lines.c[name] for name in Line.__dataclass_fields__)
NOBODY: Final = ""


@dataclass(frozen=True, slots=True)
class Undone:
    """A line that never ran, for whoever writes what it says."""

    number: int
    custom_id: str | None
    state: LineState


def insert_lines(connection: sa.Connection, batch: Batch, lines: Sequence[NewLine]) -> None:
    """Lines that are there already stay as they are."""
    rows = [
        {
            "batch_id": batch.id,
            "number": line.number,
            "account_id": batch.account_id,
            "custom_id": line.custom_id,
            "body": line.body,
            "request_id": str(uuid_utils.uuid7()),
            "attempts": 0,
            "not_before_ns": 0,
            "state": LineState.WAITING,
        }
        for line in lines
    ]
    insert_missing(connection, batch_lines, rows)


def end_waiting(
    connection: sa.Connection, batch: Batch, state: LineState, say: Callable[[Batch, Undone], bytes]
) -> int:
    """Some of those that wait end in `state` unrun; say: what such a line says. How many it was."""
    lines = batch_lines.c
    waiting = sa.and_(lines.batch_id == batch.id, lines.state == LineState.WAITING)
    columns = sa.select(lines.number, lines.custom_id, sa.func.length(lines.body))
    told, grown = [], 0
    for number, custom_id, asked in connection.execute(
        columns.where(waiting).order_by(lines.number).limit(LINES_AT_ONCE)
    ):
        said = say(batch, Undone(number, custom_id, state))
        told.append({"line": number, "said": said})
        grown += len(said) - asked
    if told:
        one = batch_lines.update().where(waiting, lines.number == sa.bindparam("line"))
        connection.execute(one.values(state=state, answer=sa.bindparam("said"), body=None), told)
        counts = {batches.c.stored_bytes: batches.c.stored_bytes + grown}
        if state is LineState.FAILED:
            counts[batches.c.failed] = batches.c.failed + len(told)
        connection.execute(batches.update().where(batches.c.id == batch.id).values(counts))
    return len(told)


def next_answers(connection: sa.Connection, mine: sa.ColumnElement[bool], after: int) -> tuple[list[bytes], int]:
    """Those of the lines that `mine` finds, behind line number `after`, and the last one's number; none at the end."""
    number, answer = batch_lines.c.number, batch_lines.c.answer
    behind = sa.and_(mine, number > after)
    sizes = sa.select(batch_lines.c.number, sa.func.length(answer)).where(behind).order_by(number)
    last, total = after, 0
    for at, size in connection.execute(sizes.limit(ANSWERS_AT_ONCE)):
        total += size
        if total > ANSWERS_BYTES_AT_ONCE and last != after:
            break
        last = at
    these = sa.select(batch_lines.c.answer).where(behind, number <= last).order_by(number)
    return list(connection.scalars(these)), last


def recount(connection: sa.Connection, batch_id: str) -> None:
    """What the batch's lines take, after some of it was deleted, and at the batch's end: who died or is of an earlier
    version may have counted otherwise.
    """
    lines = batch_lines.c
    taken = sa.func.coalesce(sa.func.length(lines.body), 0) + sa.func.coalesce(sa.func.length(lines.answer), 0)
    total = sa.select(sa.func.coalesce(sa.func.sum(taken), 0)).where(lines.batch_id == batch_id).scalar_subquery()
    connection.execute(batches.update().where(batches.c.id == batch_id).values(stored_bytes=total))


def has_any(connection: sa.Connection, batch_id: str, states: Sequence[LineState]) -> bool:
    """Is any line of the batch in one of these states?"""
    query = sa.select(batch_lines.c.number).where(batch_lines.c.batch_id == batch_id, batch_lines.c.state.in_(states))
    return connection.scalar(query.limit(1)) is not None


def of_this_attempt(line: Line) -> sa.ColumnElement[bool]:
    """Of this line this attempt, and no other."""
    lines = batch_lines.c
    return sa.and_(
        lines.batch_id == line.batch_id,
        lines.number == line.number,
        lines.state == LineState.RUNNING,
        lines.request_id == line.request_id,
    )


def leave_to_anybody(connection: sa.Connection, owner: str) -> None:
    """A process is no more, and its usage records are all in SQL: whoever comes first may judge what it was running."""
    left = sa.and_(batch_lines.c.state == LineState.RUNNING, batch_lines.c.owner == owner)
    connection.execute(batch_lines.update().where(left).values(owner=NOBODY))
