"""Who pays a charge: a postpaid account its receivable; a prepaid one its grants in order, then its wallet.

Read and used inside one write transaction; credit/ reads the same figures to say what may be held.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import sqlalchemy as sa

from billing.ledger.transactions import Entry, LedgerAccount, grant_of, receivable_of, wallet_of
from billing.tables import billing_accounts, credit_grants, ledger_accounts

_IDS_AT_ONCE = 500  # databases bound the parameters of a statement


class AccountMode(StrEnum):
    """POSTPAID: pays an invoice, up to the account's credit limit. PREPAID: pays from what it has."""

    POSTPAID = "postpaid"
    PREPAID = "prepaid"


class HoldMode(StrEnum):
    """What becomes of a request whose first outputs cost more than there is: REFUSE it, or CLAMP its outputs."""

    REFUSE = "refuse"
    CLAMP = "clamp"


@dataclass(frozen=True, slots=True)
class Paying:
    """How an account pays. revision: of its money, raised by every deed on it."""

    mode: AccountMode = AccountMode.POSTPAID
    revision: int = 0
    hold_mode: HoldMode = HoldMode.REFUSE


@dataclass(slots=True)
class OpenGrant:
    """A grant with something left."""

    account: LedgerAccount
    left_nano: int
    expires_at_ns: int | None

    def usable(self, at_ns: int) -> bool:
        return self.expires_at_ns is None or at_ns < self.expires_at_ns


@dataclass(slots=True)
class Payer:
    """rest: the account that takes what the grants do not. grants: in the order in which they are used."""

    rest: LedgerAccount
    grants: list[OpenGrant] = field(default_factory=list)

    def pay(self, cost_nano: int, at_ns: int) -> tuple[Entry, ...]:
        """The entries that come up with a charge of a request that began at `at_ns`; the grants shrink by theirs.

        The wallet takes what is left, below zero too: what was used is charged in full.
        """
        entries: list[Entry] = []
        for grant in self.grants:
            if cost_nano == 0:
                break
            taken = min(cost_nano, grant.left_nano) if grant.usable(at_ns) else 0
            if taken:
                grant.left_nano -= taken
                cost_nano -= taken
                entries.append(Entry(grant.account, -taken))
        if cost_nano:
            entries.append(Entry(self.rest, -cost_nano))
        return tuple(entries)


def read_payers(connection: sa.Connection, account_ids: Iterable[str]) -> dict[str, Payer]:
    """A payer for each account. The grants' balances stay locked until the transaction ends."""
    payers: dict[str, Payer] = {}
    listed = sorted(account_ids)
    for start in range(0, len(listed), _IDS_AT_ONCE):
        some = listed[start : start + _IDS_AT_ONCE]
        prepaid = set(
            connection.scalars(
                sa.select(billing_accounts.c.account_id).where(
                    billing_accounts.c.account_id.in_(some), billing_accounts.c.mode == AccountMode.PREPAID.value
                )
            )
        )
        for account_id in some:
            payers[account_id] = Payer(wallet_of(account_id) if account_id in prepaid else receivable_of(account_id))
        for account_id, grant in _open_grants(connection, prepaid, lock=True):
            payers[account_id].grants.append(grant)
    return payers


def read_paying(connection: sa.Connection, account_id: str) -> Paying:
    """How the account pays; as a new one does, if nothing was ever said of it."""
    columns = (billing_accounts.c.mode, billing_accounts.c.revision, billing_accounts.c.hold_mode)
    row = connection.execute(sa.select(*columns).where(billing_accounts.c.account_id == account_id)).first()
    return Paying() if row is None else Paying(AccountMode(row.mode), row.revision, HoldMode(row.hold_mode))


def open_grants(connection: sa.Connection, account_id: str) -> list[OpenGrant]:
    """The account's grants with something left, in the order in which they are used."""
    return [grant for _, grant in _open_grants(connection, {account_id}, lock=False)]


def _open_grants(connection: sa.Connection, account_ids: set[str], *, lock: bool) -> list[tuple[str, OpenGrant]]:
    if not account_ids:
        return []
    query = (
        sa.select(credit_grants, ledger_accounts.c.posted_nano)
        .join(ledger_accounts, ledger_accounts.c.id == sa.literal("grant:") + credit_grants.c.id)
        .where(credit_grants.c.account_id.in_(account_ids), ledger_accounts.c.posted_nano > 0)
        .order_by(
            credit_grants.c.account_id,
            credit_grants.c.priority,
            credit_grants.c.expires_at_ns.is_(None),  # what would expire first is used first
            credit_grants.c.expires_at_ns,
            credit_grants.c.created_at_ns,
            credit_grants.c.id,
        )
    )
    if lock:
        query = query.with_for_update(of=ledger_accounts)
    return [
        (
            row["account_id"],
            OpenGrant(grant_of(row["account_id"], row["id"]), row["posted_nano"], row["expires_at_ns"]),
        )
        for row in connection.execute(query).mappings()
    ]
