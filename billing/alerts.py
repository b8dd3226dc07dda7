"""Tells an account once per budget and period that half, most or all of it is spent, in this order.

metering.py calls `alert_spending` in the transaction that posts requests; the composition root's loop calls
`Exhausted.tell`, since a hold that is refused is a budget that is used up although less is spent.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import sqlalchemy as sa

from billing.budgets import BudgetPeriod, BudgetStanding, read_budgets, read_standing
from billing.instants import instant_text
from billing.money import usd_decimal
from billing.rollups import DAY_NS
from billing.tables import budget_alerts, budgets
from billing.webhooks.outbox import Message, enqueue
from tenancy.database import Database, insert_missing

THRESHOLDS: Final = (50, 80, 100)  # per cent
_IDS_AT_ONCE = 500  # databases bound the parameters of a statement
_NOTED_MAX = 10_000


def alert_spending(connection: sa.Connection, rows: Sequence[dict[str, Any]], now_ns: int) -> None:
    """rows: of usage_events that are posted in this transaction. What was told is not told again."""
    days: defaultdict[str, set[int]] = defaultdict(set)
    for row in rows:
        if row["cost_nano"]:
            days[row["account_id"]].add(row["started_at_ns"] // DAY_NS)
    for account_id in _with_budgets(connection, days):
        for budget in read_budgets(connection, account_id):
            periods = {budget.period.around(day * DAY_NS): day for day in sorted(days[account_id])}
            for day in periods.values():
                standing = read_standing(connection, budget, day * DAY_NS)
                reached = [one for one in THRESHOLDS if standing.spent_nano * 100 >= budget.limit_nano * one]
                _tell(connection, standing, reached, now_ns)


class Exhausted:
    """Hard budgets that refused a hold. `note` is called on the event loop, `tell` in a database thread."""

    def __init__(self, database: Database, *, clock: Callable[[], int]) -> None:
        self._database = database
        self._clock = clock
        self._noted: dict[tuple[str, str, int], int] = {}  # (account, budget, start of its period): when
        self._told: set[tuple[str, str, int]] = set()

    def note(self, account_id: str, budget_id: str, from_ns: int, at_ns: int) -> None:
        """A hold did not fit into the budget's period that begins at from_ns. Cheap: it is told later, once."""
        key = (account_id, budget_id, from_ns)
        if key not in self._told and len(self._noted) < _NOTED_MAX:
            self._noted[key] = at_ns

    def tell(self) -> None:
        """Raises TenancyUnavailable; what was noted then stays noted."""
        for key, at_ns in list(self._noted.items()):
            account_id, budget_id, _ = key
            with self._database.write() as connection:
                for budget in read_budgets(connection, account_id):
                    if budget.id == budget_id:
                        _tell(connection, read_standing(connection, budget, at_ns), THRESHOLDS, self._clock())
            if len(self._told) >= _NOTED_MAX:
                self._told.clear()  # telling again does nothing
            self._told.add(key)
            self._noted.pop(key, None)


def _with_budgets(connection: sa.Connection, account_ids: Iterable[str]) -> list[str]:
    found: list[str] = []
    listed = sorted(account_ids)
    for start in range(0, len(listed), _IDS_AT_ONCE):
        some = listed[start : start + _IDS_AT_ONCE]
        query = sa.select(budgets.c.account_id).distinct().where(budgets.c.account_id.in_(some))
        found += connection.scalars(query.where(budgets.c.removed_at_ns.is_(None)).order_by(budgets.c.account_id))
    return found


def _tell(connection: sa.Connection, standing: BudgetStanding, reached: Sequence[int], now_ns: int) -> None:
    if not reached:
        return
    budget = standing.budget
    told = set(
        connection.scalars(
            sa.select(budget_alerts.c.threshold).where(
                budget_alerts.c.budget_id == budget.id, budget_alerts.c.period_start_ns == standing.from_ns
            )
        )
    )
    for threshold in reached:
        if threshold in told:
            continue
        row = {
            "budget_id": budget.id,
            "period_start_ns": standing.from_ns,
            "threshold": threshold,
            "account_id": budget.account_id,
            "spent_nano": standing.spent_nano,
            "told_at_ns": now_ns,
        }
        insert_missing(connection, budget_alerts, [row])  # another process may tell it in this moment
        enqueue(connection, budget.account_id, _message(standing, threshold, now_ns), now_ns)


def _message(standing: BudgetStanding, threshold: int, now_ns: int) -> Message:
    budget = standing.budget
    endless = budget.period is BudgetPeriod.TOTAL
    return Message(
        id=f"budget-{budget.id}-{standing.from_ns}-{threshold}",
        kind="budget.threshold_reached",
        occurred_at=instant_text(now_ns),
        data={
            "account_id": budget.account_id,
            "budget_id": budget.id,
            "key_id": budget.key_id,
            "model": budget.model,
            "end_user": budget.end_user,
            "project_id": budget.project_id,
            "period": budget.period.value,
            "period_from": None if endless else instant_text(standing.from_ns),
            "period_to": None if endless else instant_text(standing.to_ns),
            "threshold_percent": threshold,
            "hard": budget.hard,
            "limit_usd": usd_decimal(budget.limit_nano),
            "spent_usd": usd_decimal(standing.spent_nano),
        },
    )
