"""Accounting months: which one a booking belongs to, and closing them. transactions.py and billing/invoices use it.

A month is written "2026-11", UTC. A booking belongs to the month in which its fact lies; once an account's month is
closed, a later one goes to the first month after it, as a correction there: what is closed never changes. Knows no
invoice.
"""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Final

import sqlalchemy as sa

from billing.rollups import DAY_NS
from billing.tables import ledger_periods, ledger_transactions
from tenancy.database import lock_alone, lock_beside_others

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
UNDATED: Final = "-"  # the column's default
_IDS_AT_ONCE = 500  # databases bound the parameters of a statement
_BOOKING_LOCK: Final = 0x7067_626B  # an arbitrary, fixed number: "pgbk"


def month_of(at_ns: int) -> str:
    """The calendar month, UTC, of an instant in Unix nanoseconds."""
    return (_EPOCH + timedelta(days=at_ns // DAY_NS)).strftime("%Y-%m")


def month_bounds(month: str) -> tuple[int, int]:
    """The half-open interval of a month, Unix nanoseconds. Raises ValueError for a text that is no month."""
    if len(month) != len("2026-11"):
        raise ValueError(f"{month!r} is not a month, such as 2026-11.")
    try:
        first = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC)
    except ValueError as error:
        raise ValueError(f"{month!r} is not a month, such as 2026-11.") from error
    following = (first + timedelta(days=31)).replace(day=1)
    return (first - _EPOCH).days * DAY_NS, (following - _EPOCH).days * DAY_NS


def month_after(month: str) -> str:
    return month_of(month_bounds(month)[1])


def month_before(month: str) -> str:
    return month_of(month_bounds(month)[0] - 1)


def booking_month(occurred_at_ns: int, closed_through: str | None) -> str:
    """The month that a fact is booked in, where the account's months are closed through `closed_through`."""
    month = month_of(occurred_at_ns)
    return month if closed_through is None else max(month, month_after(closed_through))


def closed_months(connection: sa.Connection, account_ids: Collection[str]) -> dict[str, str]:
    """The last closed month of each account that has one. None of them closes another until the transaction ends."""
    lock_beside_others(connection, _BOOKING_LOCK)
    closed: dict[str, str] = {}
    listed = sorted(account_ids)
    for start in range(0, len(listed), _IDS_AT_ONCE):
        query = (
            sa.select(ledger_periods.c.account_id, sa.func.max(ledger_periods.c.month))
            .where(ledger_periods.c.account_id.in_(listed[start : start + _IDS_AT_ONCE]))
            .group_by(ledger_periods.c.account_id)
        )
        closed |= {row[0]: row[1] for row in connection.execute(query)}
    return closed


def close_months(connection: sa.Connection, through: str, closed_at_ns: int, account_id: str | None = None) -> int:
    """Close every month through `through` in which something is booked, of one account or of all; returns how many.

    When the caller's write transaction has ended, nothing more will ever be booked in them: it waits for the bookings
    that run, and those that come after it see what is closed.
    """
    lock_alone(connection, _BOOKING_LOCK)
    _date_undated(connection)
    booked, closed = ledger_transactions, ledger_periods
    query = (
        sa.select(booked.c.account_id, booked.c.month)
        .distinct()
        .outerjoin(closed, sa.and_(closed.c.account_id == booked.c.account_id, closed.c.month == booked.c.month))
        .where(booked.c.month <= through, closed.c.month.is_(None))
    )
    if account_id is not None:
        query = query.where(booked.c.account_id == account_id)
    rows = [
        {"account_id": row.account_id, "month": row.month, "closed_at_ns": closed_at_ns}
        for row in connection.execute(query)
    ]
    if rows:
        connection.execute(closed.insert(), rows)
    return len(rows)


def _date_undated(connection: sa.Connection) -> None:
    """A process of the version before, which knew no months, may have booked beside this one during an upgrade."""
    booked = ledger_transactions
    rows = connection.execute(
        sa.select(booked.c.source, booked.c.account_id, booked.c.occurred_at_ns).where(booked.c.month == UNDATED)
    ).all()
    closed = closed_months(connection, {row.account_id for row in rows})
    for row in rows:
        month = booking_month(row.occurred_at_ns, closed.get(row.account_id))
        connection.execute(booked.update().where(booked.c.source == row.source).values(month=month))
