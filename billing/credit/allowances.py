"""Allowances in SQL: what each process may hold of an account's money, or of a budget's period. shared.py calls.

An allowance is money set aside for one process, so that what the processes may hold together never exceeds what there
is: balance − Σ allowances ≥ floor, and spent + Σ allowances ≤ limit. It shrinks by what the process's requests cost in
the transaction that posts them. It is a lease: a process that dies leaves it to expire.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from billing.budgets import BudgetPeriod, BudgetStanding, read_budgets, read_standing
from billing.credit.protocol import Spending
from billing.errors import BudgetExceeded, InsufficientCredits
from billing.ledger.payers import AccountMode, open_grants, read_paying
from billing.ledger.transactions import posted_nano, receivable_of, wallet_of
from billing.money import usd_decimal
from billing.tables import allowances, billing_accounts, budgets
from tenancy.database import insert_missing
from tenancy.key_groups import KeyGroups, read_groups

ACCOUNT: Final = "account"
# A grant is many requests at once while there is plenty, and exactly one near the floor.
_GENEROUS_REQUESTS = 64
_SHARE_OF_WHAT_IS_LEFT = 8

Refusal = InsufficientCredits | BudgetExceeded


@dataclass(frozen=True, slots=True)
class Pot:
    """What an allowance is of: the account's money, or one period of a budget of it (from_ns: its start)."""

    account_id: str
    budget_id: str | None = None
    from_ns: int = 0

    @property
    def name(self) -> str:
        return ACCOUNT if self.budget_id is None else f"{self.budget_id}:{self.from_ns}"


@dataclass(frozen=True, slots=True)
class Granted:
    """What a process has of each pot that a request counts for, after a grant. refusal: why it did not get enough."""

    amounts: Mapping[Pot, int]
    refusal: Refusal | None


def grant(
    connection: sa.Connection,
    process: str,
    spending: Spending,
    needed_nano: int,
    free_nano: Mapping[Pot, int],
    *,
    now_ns: int,
    lease_ns: int,
) -> Granted:
    """Let the process hold `needed_nano` more of every pot that the request counts for, or of none, in a write
    transaction of the caller. free_nano: what it has of a pot and does not use.
    """
    account_id = spending.account_id
    _let_one_grant(connection, account_id)
    connection.execute(
        allowances.delete().where(allowances.c.account_id == account_id, allowances.c.expires_at_ns <= now_ns)
    )
    # The allowances first, then what there is: a request that is posted meanwhile lessens both, and is then counted
    # twice rather than not at all.
    rows = connection.execute(sa.select(allowances).where(allowances.c.account_id == account_id)).mappings().all()
    taken: dict[str, int] = {}
    mine: dict[str, int] = {}
    for row in rows:
        taken[row["pot"]] = taken.get(row["pot"], 0) + row["amount_nano"]
        if row["process"] == process:
            mine[row["pot"]] = row["amount_nano"]
    amounts: dict[Pot, int] = {}
    wanted: list[tuple[Pot, int]] = []
    for pot, there_nano, standing in _pots(connection, spending):
        amounts[pot] = mine.get(pot.name, 0)
        missing_nano = needed_nano - free_nano.get(pot, 0)
        left_nano = there_nano - taken.get(pot.name, 0)
        if missing_nano <= 0:
            continue
        if missing_nano > left_nano:
            return Granted(amounts, _refusal(needed_nano, left_nano + free_nano.get(pot, 0), standing))
        generous = min(left_nano // _SHARE_OF_WHAT_IS_LEFT, _GENEROUS_REQUESTS * needed_nano)
        wanted.append((pot, max(missing_nano, generous)))
    for pot, more_nano in wanted:
        amounts[pot] += more_nano
        _raise(connection, process, pot, more_nano, now_ns + lease_ns)
    return Granted(amounts, None)


def give_back(connection: sa.Connection, process: str, unused_nano: Mapping[Pot, int]) -> dict[Pot, int]:
    """Lessen allowances by what is not used; returns what is left of each."""
    for pot, nano in unused_nano.items():
        connection.execute(
            allowances.update().where(_of(process, pot)).values(amount_nano=allowances.c.amount_nano - nano)
        )
    connection.execute(allowances.delete().where(allowances.c.process == process, allowances.c.amount_nano <= 0))
    return {pot: _amount(connection, process, pot) for pot in unused_nano}


def renew(connection: sa.Connection, process: str, used_nano: Mapping[Pot, int], expires_at_ns: int) -> dict[Pot, int]:
    """Keep the process's allowances until then; returns what it has of each. One that expired and was given to others
    is taken again as far as it is used: that money is being spent already.
    """
    connection.execute(allowances.update().where(allowances.c.process == process).values(expires_at_ns=expires_at_ns))
    amounts = {pot: _amount(connection, process, pot) for pot in used_nano}
    for pot, nano in used_nano.items():
        if amounts[pot] < nano:
            _raise(connection, process, pot, nano - amounts[pot], expires_at_ns)
            amounts[pot] = nano
    return amounts


def post_against(connection: sa.Connection, process: str, rows: Sequence[dict[str, Any]]) -> None:
    """Lessen the process's allowances by what its requests cost, in the transaction that posts them."""
    costly = [row for row in rows if row["cost_nano"]]
    if not costly:
        return
    held = connection.execute(
        sa.select(
            allowances.c.account_id,
            allowances.c.pot,
            budgets.c.id,
            budgets.c.key_id,
            budgets.c.project_id,
            budgets.c.end_user,
            budgets.c.model,
            budgets.c.period,
            allowances.c.from_ns,
        )
        .outerjoin(budgets, budgets.c.id == allowances.c.budget_id)
        .where(allowances.c.process == process)
        .order_by(allowances.c.account_id, allowances.c.pot)
    ).all()
    groups = {
        account_id: read_groups(connection, account_id, {row["key_id"] for row in costly})
        for account_id in {pot.account_id for pot in held if pot.key_id or pot.project_id}
    }
    for pot in held:
        mine = [row for row in costly if row["account_id"] == pot.account_id]
        spent = sum(row["cost_nano"] for row in mine if _counts(pot, row, groups.get(pot.account_id, {})))
        if spent:
            this = (
                allowances.c.process == process,
                allowances.c.account_id == pot.account_id,
                allowances.c.pot == pot.pot,
            )
            left = allowances.c.amount_nano - spent
            connection.execute(allowances.update().where(*this).values(amount_nano=sa.case((left > 0, left), else_=0)))


def forget(connection: sa.Connection, process: str) -> None:
    """A process that begins holds nothing: what it was allowed before is free again."""
    connection.execute(allowances.delete().where(allowances.c.process == process))


def read_amounts(connection: sa.Connection, process: str, pots: Iterable[Pot]) -> dict[Pot, int]:
    return {pot: _amount(connection, process, pot) for pot in pots}


def _pots(connection: sa.Connection, spending: Spending) -> list[tuple[Pot, int, BudgetStanding | None]]:
    """(pot, what there is in it, its budget) of everything that bounds the request. Unlimited money is no pot."""
    account_id = spending.account_id
    found: list[tuple[Pot, int, BudgetStanding | None]] = []
    if read_paying(connection, account_id).mode is AccountMode.PREPAID:
        usable = [grant.left_nano for grant in open_grants(connection, account_id) if grant.usable(spending.at_ns)]
        found.append((Pot(account_id), posted_nano(connection, wallet_of(account_id)) + sum(usable), None))
    elif spending.limit_nano is not None:
        owed = posted_nano(connection, receivable_of(account_id))
        found.append((Pot(account_id), spending.limit_nano + owed, None))
    for budget in read_budgets(connection, account_id):
        if budget.hard and spending.counts_for(budget):
            standing = read_standing(connection, budget, spending.at_ns)
            pot = Pot(account_id, budget.id, standing.from_ns)
            found.append((pot, budget.limit_nano - standing.spent_nano, standing))
    return found


def _refusal(needed_nano: int, left_nano: int, standing: BudgetStanding | None) -> Refusal:
    needed, left = usd_decimal(needed_nano), usd_decimal(max(0, left_nano))
    if standing is None:
        return InsufficientCredits(
            f"This request may cost {needed} USD, the account has {left} left.", left_nano=max(0, left_nano)
        )
    budget = standing.budget
    return BudgetExceeded(
        f"This request may cost {needed} USD, of the budget {budget.id} ({budget.period}) {left} are left.",
        budget_id=budget.id,
        period_start_ns=standing.from_ns,
        left_nano=max(0, left_nano),
    )


def _counts(pot: Any, row: dict[str, Any], groups: Mapping[str, KeyGroups]) -> bool:
    if pot.id is None:
        return True
    if pot.key_id is not None and pot.key_id != groups[row["key_id"]].lineage_id:
        return False
    if pot.project_id is not None and pot.project_id != groups[row["key_id"]].project_id:
        return False
    if pot.end_user not in {None, row["end_user"]}:
        return False
    return pot.model in {None, row["model"]} and BudgetPeriod(pot.period).around(row["started_at_ns"])[0] == pot.from_ns


def _let_one_grant(connection: sa.Connection, account_id: str) -> None:
    """One grant of an account at a time, in whatever process."""
    row = {"account_id": account_id, "mode": AccountMode.POSTPAID.value, "revision": 0}
    insert_missing(connection, billing_accounts, [row])
    connection.execute(
        sa.select(billing_accounts.c.account_id).where(billing_accounts.c.account_id == account_id).with_for_update()
    )


def _of(process: str, pot: Pot) -> sa.ColumnElement[bool]:
    return sa.and_(
        allowances.c.process == process, allowances.c.account_id == pot.account_id, allowances.c.pot == pot.name
    )


def _amount(connection: sa.Connection, process: str, pot: Pot) -> int:
    return connection.scalar(sa.select(allowances.c.amount_nano).where(_of(process, pot))) or 0


def _raise(connection: sa.Connection, process: str, pot: Pot, more_nano: int, expires_at_ns: int) -> None:
    row = {
        "process": process,
        "account_id": pot.account_id,
        "pot": pot.name,
        "budget_id": pot.budget_id,
        "from_ns": pot.from_ns,
        "amount_nano": 0,
        "expires_at_ns": expires_at_ns,
    }
    insert_missing(connection, allowances, [row])
    raised = allowances.c.amount_nano + more_nano
    connection.execute(
        allowances.update().where(_of(process, pot)).values(amount_nano=raised, expires_at_ns=expires_at_ns)
    )
