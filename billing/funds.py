"""What an account may still hold money against, read in one go: its balance, its floor, its budgets. For credit/.

Costs of requests that the caller still counts as running are left out, whether they are posted yet or not.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import sqlalchemy as sa

from billing.budgets import BudgetStanding, read_budgets, read_standing
from billing.ledger.payers import AccountMode, HoldMode, open_grants, read_paying
from billing.ledger.transactions import posted_nano, receivable_of, wallet_of
from billing.tables import billing_accounts, usage_events
from tenancy.database import Database
from tenancy.key_groups import KeyGroups, read_groups

_FOREVER_NS = 2**63 - 1
_IDS_AT_ONCE = 500  # databases bound the parameters of a statement


@dataclass(frozen=True, slots=True)
class Funds:
    """balance_nano: what a prepaid account has, or, negative, what a postpaid one owes. Good until `until_ns`, when a
    grant expires or a budget's period ends; and as long as the account's revision stays.
    """

    mode: AccountMode
    balance_nano: int
    revision: int
    budgets: tuple[BudgetStanding, ...]
    until_ns: int
    hold_mode: HoldMode = HoldMode.REFUSE


class _Spent(NamedTuple):
    groups: KeyGroups
    model: str
    end_user: str | None
    started_at_ns: int
    cost_nano: int


def read_funds(database: Database, account_id: str, *, at_ns: int, without: Collection[str]) -> Funds:
    """without: ids of requests whose costs are not counted. Only hard budgets are read: soft ones hold nothing."""
    with database.read() as connection:
        # First: a request that is posted while this reads is then counted, and not left out; never the other way round.
        left_out = _costs(connection, account_id, without)
        paying = read_paying(connection, account_id)
        expiries = []
        if paying.mode is AccountMode.PREPAID:
            usable = [grant for grant in open_grants(connection, account_id) if grant.usable(at_ns)]
            expiries = [grant.expires_at_ns for grant in usable if grant.expires_at_ns is not None]
            balance = posted_nano(connection, wallet_of(account_id)) + sum(grant.left_nano for grant in usable)
        else:
            balance = posted_nano(connection, receivable_of(account_id))
        standings = [
            _without(read_standing(connection, budget, at_ns), left_out)
            for budget in read_budgets(connection, account_id)
            if budget.hard
        ]
    return Funds(
        mode=paying.mode,
        balance_nano=balance + sum(spent.cost_nano for spent in left_out),
        revision=paying.revision,
        budgets=tuple(standings),
        hold_mode=paying.hold_mode,
        until_ns=min([_FOREVER_NS, *expiries, *(standing.to_ns for standing in standings)]),
    )


def read_revisions(database: Database) -> dict[str, int]:
    """The revision of every account whose money was ever touched by a deed."""
    with database.read() as connection:
        query = sa.select(billing_accounts.c.account_id, billing_accounts.c.revision)
        return {row.account_id: row.revision for row in connection.execute(query)}


def _costs(connection: sa.Connection, account_id: str, ids: Collection[str]) -> list[_Spent]:
    columns = [usage_events.c[name] for name in ("key_id", "model", "end_user", "started_at_ns", "cost_nano")]
    found: list[sa.Row[Any]] = []
    waiting = iter(ids)
    while some := list(islice(waiting, _IDS_AT_ONCE)):
        query = sa.select(*columns).where(usage_events.c.account_id == account_id, usage_events.c.id.in_(some))
        found += connection.execute(query)
    groups = read_groups(connection, account_id, {row.key_id for row in found})
    return [_Spent(groups[row.key_id], row.model, row.end_user, row.started_at_ns, row.cost_nano) for row in found]


def _without(standing: BudgetStanding, left_out: list[_Spent]) -> BudgetStanding:
    counted = sum(
        spent.cost_nano
        for spent in left_out
        if standing.from_ns <= spent.started_at_ns < standing.to_ns
        and standing.budget.covers(spent.groups, spent.model, spent.end_user)
    )
    return replace(standing, spent_nano=standing.spent_nano - counted)
