"""Budgets: what an account, project, key, model or end user may cost in a UTC day, a calendar month, or in all.

A period is a half-open UTC interval; what is spent in it is the sum of the requests that began in it, as the rollups
have it: there is no counter to reset, and a budget set today counts its whole current period. A hard budget is held
against (credit/); a soft one is only reported. Called by the command line and the console.
"""

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

import sqlalchemy as sa

from billing.attributed_usage import spent_by_end_user
from billing.attribution import END_USER_CHARS_MAX
from billing.errors import BudgetNotFound, LedgerConflict
from billing.ledger.wallet import AMOUNT_NANO_MAX, raise_revision
from billing.rollups import DAY_NS, view_for
from billing.tables import attributed_usage, budgets, usage_rollups
from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database
from tenancy.errors import ScopeMissing
from tenancy.key_groups import KeyGroups, in_lineage, in_project, read_groups
from tenancy.rule_setters import RuleSetter

_ALL_TIME: Final = (0, 2**63 - 1)
_BUDGETS_MAX = 1_000
_EPOCH: Final = datetime.fromtimestamp(0, UTC)


class BudgetPeriod(StrEnum):
    DAY = "day"
    MONTH = "month"
    TOTAL = "total"

    def around(self, at_ns: int) -> tuple[int, int]:
        """The half-open period, in Unix nanoseconds, in which `at_ns` lies."""
        if self is BudgetPeriod.TOTAL:
            return _ALL_TIME
        if self is BudgetPeriod.DAY:
            start_ns = at_ns // DAY_NS * DAY_NS
            return start_ns, start_ns + DAY_NS
        day = _EPOCH + timedelta(days=at_ns // DAY_NS)
        first = day.replace(day=1)
        following = (first + timedelta(days=31)).replace(day=1)
        return (first - _EPOCH).days * DAY_NS, (following - _EPOCH).days * DAY_NS


@dataclass(frozen=True, slots=True)
class Budget:
    """key_id, model, project_id, end_user: None covers every one, and who names none.

    key_id: of a lineage, whose keys share the budget. set_by: in whose name.
    """

    id: str
    account_id: str
    key_id: str | None
    model: str | None
    period: BudgetPeriod
    limit_nano: int
    hard: bool
    created_at_ns: int
    project_id: str | None = None
    end_user: str | None = None
    set_by: RuleSetter = RuleSetter.OPERATOR

    def covers(self, groups: KeyGroups, model: str, end_user: str | None) -> bool:
        return (
            self.key_id in {None, groups.lineage_id}
            and self.project_id in {None, groups.project_id}
            and self.model in {None, model}
            and self.end_user in {None, end_user}
        )


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """A budget and what is spent of it in one of its periods."""

    budget: Budget
    from_ns: int
    to_ns: int
    spent_nano: int


class Budgets:
    def __init__(self, database: Database, *, clock: Callable[[], int]) -> None:
        self._database = database
        self._clock = clock

    def add(
        self,
        account_id: str,
        limit_nano: int,
        period: BudgetPeriod,
        *,
        key_id: str | None = None,
        model: str | None = None,
        project_id: str | None = None,
        end_user: str | None = None,
        hard: bool = True,
        setter: RuleSetter = RuleSetter.OPERATOR,
        by: Actor = COMMAND_LINE,
    ) -> BudgetStanding:
        """Set a budget; returns what of the current period is spent already.

        key_id: any key of a lineage. Raises LedgerConflict.
        """
        if key_id is not None and project_id is not None:
            raise LedgerConflict("A key is in one project already: name the key or the project.")
        if end_user is not None and not 1 <= len(end_user) <= END_USER_CHARS_MAX:
            raise LedgerConflict(f"An end user is named by 1 to {END_USER_CHARS_MAX} characters.")
        if not 0 <= limit_nano <= AMOUNT_NANO_MAX:
            raise LedgerConflict("A budget is not negative, and at most a million USD.")
        with self._database.write() as connection:
            if key_id is not None:
                key_id = read_groups(connection, account_id, {key_id})[key_id].lineage_id
            budget = Budget(
                id=secrets.token_hex(16),
                account_id=account_id,
                key_id=key_id,
                model=model,
                period=period,
                limit_nano=limit_nano,
                hard=hard,
                created_at_ns=self._clock(),
                project_id=project_id,
                end_user=end_user,
                set_by=setter,
            )
            raise_revision(connection, account_id)
            if len(read_budgets(connection, account_id)) >= _BUDGETS_MAX:
                raise LedgerConflict(f"An account has at most {_BUDGETS_MAX} budgets.")
            row = asdict(budget) | {"period": period.value, "set_by": setter.value, "removed_at_ns": None}
            connection.execute(budgets.insert(), row)
            standing = read_standing(connection, budget, budget.created_at_ns)
            audit_log.record(
                connection,
                at_ns=budget.created_at_ns,
                by=by,
                account_id=account_id,
                action="budget.add",
                subject=budget.id,
                limit_nano=limit_nano,
                period=period.value,
                key_id=key_id,
                model=model,
                project_id=project_id,
                of_one_end_user=end_user is not None,
                hard=hard,
                set_by=setter.value,
            )
            return standing

    def remove(
        self,
        account_id: str,
        budget_id: str,
        *,
        remover: RuleSetter = RuleSetter.OPERATOR,
        by: Actor = COMMAND_LINE,
    ) -> None:
        """Raises BudgetNotFound for an unknown budget and another account's alike, and ScopeMissing where an account
        would remove what an operator set.
        """
        with self._database.write() as connection:
            raise_revision(connection, account_id)
            query = (
                budgets.update()
                .where(budgets.c.account_id == account_id, budgets.c.id == budget_id, budgets.c.removed_at_ns.is_(None))
                .values(removed_at_ns=self._clock())
                .returning(budgets.c.set_by)
            )
            set_by = connection.scalar(query)
            if set_by is None:
                raise BudgetNotFound("There is no such budget in this account.")
            if not remover.may_remove(RuleSetter(set_by)):
                raise ScopeMissing("This budget was set by the operator (operator:write), and is theirs to remove.")
            audit_log.record(
                connection,
                at_ns=self._clock(),
                by=by,
                account_id=account_id,
                action="budget.remove",
                subject=budget_id,
            )

    def standings(self, account_id: str, at_ns: int | None = None) -> list[BudgetStanding]:
        """Every budget, and what is spent of it in the period around `at_ns`: now, or one that is over."""
        at_ns = self._clock() if at_ns is None else at_ns
        with self._database.read() as connection:
            return [read_standing(connection, budget, at_ns) for budget in read_budgets(connection, account_id)]


def read_budgets(connection: sa.Connection, account_id: str) -> list[Budget]:
    """Those in force, oldest first."""
    columns = [column for column in budgets.c if column.name != "removed_at_ns"]
    query = (
        sa.select(*columns)
        .where(budgets.c.account_id == account_id, budgets.c.removed_at_ns.is_(None))
        .order_by(budgets.c.created_at_ns, budgets.c.id)
        .limit(_BUDGETS_MAX)
    )
    return [_budget(row) for row in connection.execute(query).mappings()]


def _budget(row: sa.RowMapping) -> Budget:
    return Budget(**{**row, "period": BudgetPeriod(row["period"]), "set_by": RuleSetter(row["set_by"])})


def read_standing(connection: sa.Connection, budget: Budget, at_ns: int) -> BudgetStanding:
    from_ns, to_ns = budget.period.around(at_ns)
    table = usage_rollups if budget.end_user is None else attributed_usage
    account_id, told, covered = budget.account_id, table.c, {}
    if budget.key_id is not None:
        covered["key_id"] = in_lineage(told.key_id, account_id, budget.key_id)
    if budget.project_id is not None:
        covered["key_id"] = in_project(told.key_id, account_id, budget.project_id)
    if budget.model is not None:
        covered["model"] = told.model == budget.model
    if budget.end_user is not None:
        spent_nano = spent_by_end_user(connection, account_id, budget.end_user, from_ns, to_ns, tuple(covered.values()))
        return BudgetStanding(budget, from_ns, to_ns, spent_nano)
    query = sa.select(sa.func.coalesce(sa.func.sum(usage_rollups.c.cost_nano), 0)).where(
        usage_rollups.c.account_id == account_id,
        usage_rollups.c.view == view_for(covered),
        usage_rollups.c.grain == "day",
        usage_rollups.c.period_start_ns >= from_ns,
        usage_rollups.c.period_start_ns < to_ns,
        *covered.values(),
    )
    return BudgetStanding(budget, from_ns, to_ns, int(connection.scalar(query) or 0))
