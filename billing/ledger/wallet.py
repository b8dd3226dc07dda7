"""Deeds on an account's money: top-ups, payments, grants, reversals, expiry, how it pays. The command line calls them.

Each is one write transaction. Top-ups and grants carry an idempotency key, so that doing one again books it once; a
transaction is taken back at most once by its nature. Who may do what is the caller's matter.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from billing.errors import IdempotencyMismatch, LedgerConflict, TransactionNotFound
from billing.ledger.payers import AccountMode, HoldMode, read_paying
from billing.ledger.transactions import (
    BREAKAGE,
    CASH,
    PROMOTION,
    Entry,
    LedgerAccount,
    LedgerAccountKind,
    Transaction,
    TransactionKind,
    grant_of,
    moved,
    post,
    posted_nano,
    read_transaction,
    receivable_of,
    wallet_of,
)
from billing.money import usd_decimal
from billing.tables import billing_accounts, credit_grants, ledger_accounts
from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database, insert_missing

# A million dollars: beyond lies a slip of the keyboard, and a thousandth of BIGINT.
AMOUNT_NANO_MAX = 10**15
_KEY_CHARACTERS_MAX = 100
_MEMO_CHARACTERS_MAX = 200
# Usage from before an expiry may be posted after it: the record of a gateway that was down, or of a database that was.
_EXPIRY_GRACE_NS = 24 * 3_600 * 1_000_000_000
_EXPIRED_AT_ONCE = 500
_GRANTS_SHOWN_MAX = 1_000
_INVOICE_TO_CHARACTERS_MAX = 500
_INVOICE_TO_LINES_MAX = 8
_REVERSIBLE = frozenset(
    {TransactionKind.USAGE, TransactionKind.TOP_UP, TransactionKind.PAYMENT, TransactionKind.GRANT},
)
# The kinds of money that comes in, as their sources begin.
_RECEIVED = {TransactionKind.TOP_UP: "top-up", TransactionKind.PAYMENT: "payment"}


@dataclass(frozen=True, slots=True)
class Grant:
    """left_nano: what is left of it now. priority: the lowest is used first."""

    id: str
    amount_nano: int
    left_nano: int
    priority: int
    expires_at_ns: int | None
    created_at_ns: int


@dataclass(frozen=True, slots=True)
class WalletView:
    """What is posted. owed_nano: what a postpaid account has used and not paid yet."""

    account_id: str
    mode: AccountMode
    hold_mode: HoldMode
    wallet_nano: int
    owed_nano: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Booked:
    """replayed: it had been booked before, and nothing was booked now."""

    source: str
    replayed: bool


class Wallets:
    def __init__(self, database: Database, *, clock: Callable[[], int]) -> None:
        self._database = database
        self._clock = clock

    def top_up(
        self,
        account_id: str,
        amount_nano: int,
        *,
        idempotency_key: str,
        memo: str | None = None,
        by: Actor = COMMAND_LINE,
    ) -> Booked:
        """Money that came in. Raises IdempotencyMismatch if the key stands for another amount."""
        return self._receive(
            TransactionKind.TOP_UP,
            wallet_of(account_id),
            amount_nano,
            idempotency_key=idempotency_key,
            memo=memo,
            by=by,
        )

    def pay(
        self,
        account_id: str,
        amount_nano: int,
        *,
        idempotency_key: str,
        memo: str | None = None,
        by: Actor = COMMAND_LINE,
    ) -> Booked:
        """Money that came in for invoices: it lessens what the account owes. Raises IdempotencyMismatch as top_up."""
        return self._receive(
            TransactionKind.PAYMENT,
            receivable_of(account_id),
            amount_nano,
            idempotency_key=idempotency_key,
            memo=memo,
            by=by,
        )

    def grant(
        self,
        account_id: str,
        amount_nano: int,
        *,
        idempotency_key: str,
        priority: int = 0,
        expires_at_ns: int | None = None,
        memo: str | None = None,
        by: Actor = COMMAND_LINE,
    ) -> Booked:
        """Money given; used before the wallet, and gone when it expires. Raises IdempotencyMismatch."""
        source = _keyed_source("grant", account_id, idempotency_key)
        _check_amount(amount_nano)
        now_ns = self._clock()
        with self._database.write() as connection:
            raise_revision(connection, account_id)
            query = sa.select(credit_grants).where(credit_grants.c.source == source)
            before = connection.execute(query).mappings().first()
            if before is not None:
                terms = (before["amount_nano"], before["priority"], before["expires_at_ns"])
                if terms != (amount_nano, priority, expires_at_ns):
                    raise _mismatch(idempotency_key)
                return Booked(source, replayed=True)
            if expires_at_ns is not None and expires_at_ns <= now_ns:
                raise LedgerConflict("The grant's expiry has passed already.")
            grant_id = secrets.token_hex(16)
            connection.execute(
                credit_grants.insert().values(
                    id=grant_id,
                    account_id=account_id,
                    source=source,
                    amount_nano=amount_nano,
                    priority=priority,
                    expires_at_ns=expires_at_ns,
                    created_at_ns=now_ns,
                )
            )
            entries = moved(PROMOTION, grant_of(account_id, grant_id), amount_nano)
            self._post(connection, source, TransactionKind.GRANT, account_id, entries, memo=memo)
            self._log(connection, by, account_id, "wallet.grant", source, amount_nano=amount_nano)
        return Booked(source, replayed=False)

    def reverse(self, account_id: str, source: str, *, memo: str | None = None, by: Actor = COMMAND_LINE) -> Booked:
        """Take a transaction back by booking its opposite: refund usage, undo a top-up or a grant.

        Raises TransactionNotFound for an unknown one and another account's alike; LedgerConflict if it is none that can
        be taken back, or if the money is not there any more.
        """
        reversal = f"reversal:{source}"
        with self._database.write() as connection:
            raise_revision(connection, account_id)
            original = read_transaction(connection, source)
            if original is None or original.account_id != account_id:
                raise TransactionNotFound("There is no such transaction in this account.")
            if original.kind not in _REVERSIBLE:
                raise LedgerConflict(f"A transaction of the kind {original.kind} is not taken back.")
            if read_transaction(connection, reversal) is not None:
                return Booked(reversal, replayed=True)
            entries = tuple(Entry(entry.account, -entry.amount_nano) for entry in original.entries)
            if original.kind is not TransactionKind.USAGE:
                _check_covered(connection, entries)
            self._post(connection, reversal, TransactionKind.REVERSAL, account_id, entries, memo=memo, reverses=source)
            self._log(connection, by, account_id, "wallet.reverse", source)
        return Booked(reversal, replayed=False)

    def set_mode(self, account_id: str, mode: AccountMode, *, by: Actor = COMMAND_LINE) -> None:
        """How the account pays from now on. What was posted before stays where it is."""
        with self._database.write() as connection:
            raise_revision(connection, account_id)
            connection.execute(
                billing_accounts.update().where(billing_accounts.c.account_id == account_id).values(mode=mode.value)
            )
            self._log(connection, by, account_id, "wallet.set_mode", account_id, mode=mode.value)

    def set_hold_mode(self, account_id: str, hold_mode: HoldMode, *, by: Actor = COMMAND_LINE) -> None:
        """What becomes of requests that cost more than there is, from now on."""
        with self._database.write() as connection:
            raise_revision(connection, account_id)
            mine = billing_accounts.c.account_id == account_id
            connection.execute(billing_accounts.update().where(mine).values(hold_mode=hold_mode.value))
            self._log(connection, by, account_id, "wallet.set_hold_mode", account_id, hold_mode=hold_mode.value)

    def set_invoice_to(self, account_id: str, text: str, *, by: Actor = COMMAND_LINE) -> None:
        """The name and address on the account's invoices from now on. Raises LedgerConflict for a text that is none."""
        lines = text.strip().splitlines()
        if (
            len(text) > _INVOICE_TO_CHARACTERS_MAX
            or len(lines) > _INVOICE_TO_LINES_MAX
            or not all(line.isprintable() for line in lines)
        ):
            raise LedgerConflict(
                f"A name and address have at most {_INVOICE_TO_LINES_MAX} printable lines and "
                f"{_INVOICE_TO_CHARACTERS_MAX} characters."
            )
        with self._database.write() as connection:
            raise_revision(connection, account_id)
            connection.execute(
                billing_accounts.update()
                .where(billing_accounts.c.account_id == account_id)
                .values(invoice_to="\n".join(lines))
            )
            self._log(connection, by, account_id, "wallet.set_invoice_to", account_id)

    def expire_due(self) -> int:
        """Book what is left of grants that expired a day ago and longer; returns how many. The service calls it."""
        due_ns = self._clock() - _EXPIRY_GRACE_NS
        query = (
            sa.select(credit_grants, ledger_accounts.c.posted_nano)
            .join(ledger_accounts, ledger_accounts.c.id == sa.literal("grant:") + credit_grants.c.id)
            .where(credit_grants.c.expires_at_ns <= due_ns, ledger_accounts.c.posted_nano > 0)
            .order_by(credit_grants.c.expires_at_ns, credit_grants.c.id)
            .limit(_EXPIRED_AT_ONCE)
            .with_for_update(of=ledger_accounts)
        )
        with self._database.write() as connection:
            due = connection.execute(query).mappings().all()
            for row in due:
                account_id = row["account_id"]
                raise_revision(connection, account_id)
                self._post(
                    connection,
                    # A refund may fill an expired grant again, so it may expire more than once.
                    f"expiry:{row['id']}:{self._clock()}",
                    TransactionKind.EXPIRY,
                    account_id,
                    moved(grant_of(account_id, row["id"]), BREAKAGE, row["posted_nano"]),
                    occurred_at_ns=row["expires_at_ns"],
                )
        return len(due)

    def show(self, account_id: str) -> WalletView:
        query = (
            sa.select(credit_grants, ledger_accounts.c.posted_nano)
            .join(ledger_accounts, ledger_accounts.c.id == sa.literal("grant:") + credit_grants.c.id)
            .where(credit_grants.c.account_id == account_id)
            .order_by(credit_grants.c.created_at_ns.desc(), credit_grants.c.id)
            .limit(_GRANTS_SHOWN_MAX)
        )
        with self._database.read() as connection:
            paying = read_paying(connection, account_id)
            return WalletView(
                account_id=account_id,
                mode=paying.mode,
                hold_mode=paying.hold_mode,
                wallet_nano=posted_nano(connection, wallet_of(account_id)),
                owed_nano=-posted_nano(connection, receivable_of(account_id)),
                grants=tuple(_grant(row) for row in connection.execute(query).mappings()),
            )

    def _receive(
        self,
        kind: TransactionKind,
        into: LedgerAccount,
        amount_nano: int,
        *,
        idempotency_key: str,
        memo: str | None,
        by: Actor,
    ) -> Booked:
        account_id = into.account_id
        assert account_id is not None, "money is received for a customer"
        source = _keyed_source(_RECEIVED[kind], account_id, idempotency_key)
        _check_amount(amount_nano)
        entries = moved(CASH, into, amount_nano)
        with self._database.write() as connection:
            raise_revision(connection, account_id)
            booked = read_transaction(connection, source)
            if booked is not None:
                if set(booked.entries) != set(entries):
                    raise _mismatch(idempotency_key)
                return Booked(source, replayed=True)
            self._post(connection, source, kind, account_id, entries, memo=memo)
            deed = "wallet." + _RECEIVED[kind].replace("-", "_")
            self._log(connection, by, account_id, deed, source, amount_nano=amount_nano)
        return Booked(source, replayed=False)

    def _log(
        self,
        connection: sa.Connection,
        by: Actor,
        account_id: str,
        action: str,
        subject: str,
        **detail: str | int | bool | None,
    ) -> None:
        audit_log.record(
            connection, at_ns=self._clock(), by=by, account_id=account_id, action=action, subject=subject, **detail
        )

    def _post(
        self,
        connection: sa.Connection,
        source: str,
        kind: TransactionKind,
        account_id: str,
        entries: tuple[Entry, ...],
        *,
        memo: str | None = None,
        reverses: str | None = None,
        occurred_at_ns: int | None = None,
    ) -> None:
        _check_memo(memo)
        now_ns = self._clock()
        occurred_at_ns = now_ns if occurred_at_ns is None else occurred_at_ns
        transaction = Transaction(source, kind, account_id, occurred_at_ns, entries, reverses=reverses, memo=memo)
        post(connection, [transaction], now_ns)


def raise_revision(connection: sa.Connection, account_id: str) -> None:
    """Raise the account's revision, which also keeps its other deeds out until this one is done."""
    row = {"account_id": account_id, "mode": AccountMode.POSTPAID.value, "revision": 0}
    insert_missing(connection, billing_accounts, [row])
    connection.execute(
        billing_accounts.update()
        .where(billing_accounts.c.account_id == account_id)
        .values(revision=billing_accounts.c.revision + 1)
    )


def _check_covered(connection: sa.Connection, entries: tuple[Entry, ...]) -> None:
    """What a customer has may not fall below nothing by a deed."""
    for entry in entries:
        if entry.account.kind in {LedgerAccountKind.WALLET, LedgerAccountKind.GRANT}:
            left_nano = posted_nano(connection, entry.account)
            if left_nano + entry.amount_nano < 0:
                raise LedgerConflict(f"Of this money {usd_decimal(left_nano)} USD is left: it can't be taken back.")


def _keyed_source(kind: str, account_id: str, idempotency_key: str) -> str:
    key = idempotency_key
    if not 1 <= len(key) <= _KEY_CHARACTERS_MAX or not key.isascii() or not key.isprintable():
        raise LedgerConflict(f"An idempotency key is 1 to {_KEY_CHARACTERS_MAX} printable ASCII characters.")
    return f"{kind}:{account_id}:{key}"


def _check_amount(amount_nano: int) -> None:
    if not 1 <= amount_nano <= AMOUNT_NANO_MAX:
        raise LedgerConflict(f"An amount is above 0 and at most {usd_decimal(AMOUNT_NANO_MAX)} USD.")


def _check_memo(memo: str | None) -> None:
    if memo is not None and (len(memo) > _MEMO_CHARACTERS_MAX or not memo.isprintable()):
        raise LedgerConflict(f"A memo is one line of at most {_MEMO_CHARACTERS_MAX} printable characters.")


def _mismatch(idempotency_key: str) -> IdempotencyMismatch:
    return IdempotencyMismatch(f"The idempotency key {idempotency_key!r} was used for something else.")


def _grant(row: sa.RowMapping) -> Grant:
    return Grant(
        id=row["id"],
        amount_nano=row["amount_nano"],
        left_nano=row["posted_nano"],
        priority=row["priority"],
        expires_at_ns=row["expires_at_ns"],
        created_at_ns=row["created_at_ns"],
    )
