"""Transactions that sum to zero, and their posting. Used by posting.py (usage) and wallet.py (top-ups and the rest).

Signs: what customers have, and what the service earned, is positive; what they owe, and what came in, is negative.

    top-up    cash −a           wallet +a
    grant     promotion −a      grant +a
    usage     wallet, grant −c  revenue +c      prepaid: grants first, by priority and expiry
              receivable −c     revenue +c      postpaid
    payment   cash −a           receivable +a   an invoice of a postpaid account is paid
    expiry    grant −x          breakage +x
    rounding  receivable −r     rounding +r     an invoice is due in whole cents
    adjusted  as usage; less, to the wallet     what a month's volume made its tokens cost more or less
    reversal  the entries of another transaction, negated

Nothing is ever changed or deleted; a balance is the sum of its entries, kept beside them and checked by audit.py.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa

from billing.ledger.periods import booking_month, closed_months
from billing.tables import ledger_accounts, ledger_entries, ledger_transactions
from tenancy.database import insert_missing


class LedgerAccountKind(StrEnum):
    CASH = "cash"
    PROMOTION = "promotion"
    WALLET = "wallet"
    GRANT = "grant"
    RECEIVABLE = "receivable"
    REVENUE = "revenue"
    BREAKAGE = "breakage"
    ROUNDING = "rounding"


class TransactionKind(StrEnum):
    USAGE = "usage"
    TOP_UP = "top_up"
    PAYMENT = "payment"
    GRANT = "grant"
    EXPIRY = "expiry"
    REVERSAL = "reversal"
    ROUNDING = "rounding"
    ADJUSTMENT = "adjustment"


@dataclass(frozen=True, slots=True, order=True)
class LedgerAccount:
    """account_id: None for the service's own accounts."""

    id: str
    kind: LedgerAccountKind
    account_id: str | None = None


CASH = LedgerAccount("cash", LedgerAccountKind.CASH)
PROMOTION = LedgerAccount("promotion", LedgerAccountKind.PROMOTION)
REVENUE = LedgerAccount("revenue", LedgerAccountKind.REVENUE)
BREAKAGE = LedgerAccount("breakage", LedgerAccountKind.BREAKAGE)
ROUNDING = LedgerAccount("rounding", LedgerAccountKind.ROUNDING)


def wallet_of(account_id: str) -> LedgerAccount:
    return LedgerAccount(f"wallet:{account_id}", LedgerAccountKind.WALLET, account_id)


def receivable_of(account_id: str) -> LedgerAccount:
    return LedgerAccount(f"receivable:{account_id}", LedgerAccountKind.RECEIVABLE, account_id)


def grant_of(account_id: str, grant_id: str) -> LedgerAccount:
    return LedgerAccount(f"grant:{grant_id}", LedgerAccountKind.GRANT, account_id)


def usage_source(request_id: str) -> str:
    return f"usage:{request_id}"


@dataclass(frozen=True, slots=True)
class Entry:
    account: LedgerAccount
    amount_nano: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """source: the fact that it books. reverses: the source of the transaction that it takes back.

    month: the accounting month of one that belongs to a closed month by its nature; None lets its date decide.
    """

    source: str
    kind: TransactionKind
    account_id: str
    occurred_at_ns: int
    entries: tuple[Entry, ...]
    reverses: str | None = None
    memo: str | None = None
    month: str | None = None

    def __post_init__(self) -> None:
        assert self.entries, f"{self.source} books nothing"
        assert sum(entry.amount_nano for entry in self.entries) == 0, f"{self.source} does not sum to zero"
        assert len({entry.account.id for entry in self.entries}) == len(self.entries), f"{self.source}: entries merge"


def moved(source: LedgerAccount, target: LedgerAccount, amount_nano: int) -> tuple[Entry, ...]:
    """The entries of an amount that goes from one account to another."""
    return (Entry(source, -amount_nano), Entry(target, amount_nano))


def post(connection: sa.Connection, transactions: Sequence[Transaction], posted_at_ns: int) -> None:
    """Book transactions that are not booked yet, and move the balances, in the caller's write transaction.

    One that is booked already is a bug of the caller, and fails on the source's uniqueness.
    """
    if not transactions:
        return
    deltas: defaultdict[LedgerAccount, int] = defaultdict(int)
    for transaction in transactions:
        for entry in transaction.entries:
            deltas[entry.account] += entry.amount_nano
    # In order of id, so that two processes that post at once can't lock each other out.
    accounts = sorted(deltas)
    closed = closed_months(connection, {one.account_id for one in transactions})
    insert_missing(connection, ledger_accounts, [_account_row(account) for account in accounts])
    connection.execute(
        ledger_transactions.insert(),
        [_row(one, posted_at_ns, closed.get(one.account_id)) for one in transactions],
    )
    connection.execute(
        ledger_entries.insert(),
        [
            {"source": one.source, "ledger_account_id": entry.account.id, "amount_nano": entry.amount_nano}
            for one in transactions
            for entry in one.entries
        ],
    )
    connection.execute(
        ledger_accounts.update()
        .where(ledger_accounts.c.id == sa.bindparam("moved_id"))
        .values(posted_nano=ledger_accounts.c.posted_nano + sa.bindparam("delta_nano")),
        [{"moved_id": account.id, "delta_nano": deltas[account]} for account in accounts],
    )


def read_transaction(connection: sa.Connection, source: str) -> Transaction | None:
    """A booked transaction with its entries."""
    row = (
        connection.execute(sa.select(ledger_transactions).where(ledger_transactions.c.source == source))
        .mappings()
        .first()
    )
    if row is None:
        return None
    query = (
        sa.select(ledger_entries.c.amount_nano, ledger_accounts)
        .join(ledger_accounts, ledger_accounts.c.id == ledger_entries.c.ledger_account_id)
        .where(ledger_entries.c.source == source)
        .order_by(ledger_entries.c.ledger_account_id)
    )
    entries = tuple(
        Entry(LedgerAccount(one["id"], LedgerAccountKind(one["kind"]), one["account_id"]), one["amount_nano"])
        for one in connection.execute(query).mappings()
    )
    return Transaction(
        source=source,
        kind=TransactionKind(row["kind"]),
        account_id=row["account_id"],
        occurred_at_ns=row["occurred_at_ns"],
        entries=entries,
        reverses=row["reverses"],
        memo=row["memo"],
        month=row["month"],
    )


def posted_nano(connection: sa.Connection, account: LedgerAccount) -> int:
    """The account's balance; 0 if nothing was ever booked on it."""
    query = sa.select(ledger_accounts.c.posted_nano).where(ledger_accounts.c.id == account.id)
    return int(connection.scalar(query) or 0)


def _account_row(account: LedgerAccount) -> dict[str, object]:
    return {"id": account.id, "kind": str(account.kind), "account_id": account.account_id, "posted_nano": 0}


def _row(transaction: Transaction, posted_at_ns: int, closed_through: str | None) -> dict[str, object]:
    return {
        "source": transaction.source,
        "kind": str(transaction.kind),
        "account_id": transaction.account_id,
        "reverses": transaction.reverses,
        "memo": transaction.memo,
        "occurred_at_ns": transaction.occurred_at_ns,
        "posted_at_ns": posted_at_ns,
        "month": transaction.month or booking_month(transaction.occurred_at_ns, closed_through),
    }
