"""Closes months: one invoice per account and month, and a seal over what it rests on. The command line and a loop call.

Three steps, each of which may be killed and done again: close (nothing more is booked in the month), write the invoice
with its rounding, seal. So an account has at most one invoice of a month, and a closed month always gets its own.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import orjson
import sqlalchemy as sa

from billing.instants import instant_text
from billing.invoices.document import NANO_PER_CENT, Invoice, InvoiceLine, LineKind, VolumeTerms, cents_text, in_cents
from billing.invoices.seal import seal_month
from billing.invoices.volumes import Adjustment, book_adjustments, find_adjustments
from billing.ledger.periods import close_months, month_bounds
from billing.ledger.transactions import (
    REVENUE,
    ROUNDING,
    LedgerAccountKind,
    Transaction,
    TransactionKind,
    moved,
    post,
    receivable_of,
    usage_source,
)
from billing.money import usd_decimal
from billing.tables import (
    billing_accounts,
    invoices,
    ledger_accounts,
    ledger_entries,
    ledger_periods,
    ledger_transactions,
    prices,
    usage_events,
)
from billing.webhooks.outbox import Message, enqueue
from tenancy import audit_log
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database, let_one_pass


@dataclass(frozen=True, slots=True)
class Closed:
    """months: that were closed now. invoices: written now. sealed: months whose seal was set now."""

    months: int
    invoices: int
    sealed: int


class MonthClose:
    """seller: the lines that head every invoice from now on."""

    def __init__(self, database: Database, *, seller: str, clock: Callable[[], int]) -> None:
        self._database = database
        self._seller = seller
        self._clock = clock

    def close(self, through: str, account_id: str | None = None, *, by: Actor = COMMAND_LINE) -> Closed:
        """Close every month through `through`, of one account or all, and finish what an earlier run left undone.

        Raises ValueError if `through` is no month or has not ended.
        """
        now_ns = self._clock()
        if month_bounds(through)[1] > now_ns:
            raise ValueError(f"The month {through} has not ended.")
        with self._database.write() as connection:
            months = close_months(connection, through, now_ns, account_id)
            if months:
                _log(connection, by, account_id, "month.close", through, now_ns, months=months)
        unsealed = sa.select(ledger_periods.c.account_id, ledger_periods.c.month).where(
            ledger_periods.c.digest.is_(None)
        )
        with self._database.read() as connection:
            # In order of month: a seal covers the one before it.
            pending = connection.execute(unsealed.order_by(ledger_periods.c.month, ledger_periods.c.account_id)).all()
        written = 0
        for owner, month in pending:
            written += self._write_invoice(owner, month, by)
            seal_month(self._database, owner, month)
        return Closed(months, written, len(pending))

    def _write_invoice(self, account_id: str, month: str, by: Actor) -> bool:
        """The month's invoice and the bookings that come with it, together; none if there is nothing to tell."""
        with self._database.read() as connection:  # a closed month does not change: only the writing needs the lock
            lines = (*_usage_lines(connection, account_id, month), *_refund_lines(connection, account_id, month))
            adjustments = find_adjustments(connection, account_id, month)
            used_nano = _owed_nano(connection, account_id, month)
        if not lines:
            return False
        lines += tuple(map(_volume_line, adjustments))
        total_nano = sum(line.amount_nano for line in lines)
        with self._database.write() as connection:
            let_one_pass(connection)  # numbers have no gaps
            known = sa.select(invoices.c.number).where(invoices.c.account_id == account_id, invoices.c.month == month)
            if connection.scalar(known) is not None:
                return False
            issued_at_ns = self._clock()
            adjusted = book_adjustments(connection, account_id, month, adjustments, issued_at_ns)
            owed_nano = used_nano - sum(
                entry.amount_nano for entry in adjusted if entry.account.kind is LedgerAccountKind.RECEIVABLE
            )
            rounding_nano = in_cents(owed_nano) * NANO_PER_CENT - owed_nano
            invoice = Invoice(
                number=1 + (connection.scalar(sa.select(sa.func.max(invoices.c.number))) or 0),
                account_id=account_id,
                month=month,
                issued_at_ns=issued_at_ns,
                seller=self._seller,
                buyer=_invoice_to(connection, account_id),
                lines=lines,
                total_nano=total_nano,
                paid_nano=total_nano - owed_nano,
                rounding_nano=rounding_nano,
                due_cents=in_cents(owed_nano),
            )
            connection.execute(invoices.insert().values(asdict(invoice) | {"lines": _packed(lines)}))
            if rounding_nano:
                post(connection, [_rounding(invoice)], invoice.issued_at_ns)
            enqueue(connection, account_id, _message(invoice), invoice.issued_at_ns)
            told = {"number": invoice.number, "due_cents": invoice.due_cents}
            _log(connection, by, account_id, "invoice.write", month, invoice.issued_at_ns, **told)
        return True


def _log(  # noqa: PLR0917 - by whom, whose, what, to what, when: always in this order
    connection: sa.Connection,
    by: Actor,
    account_id: str | None,
    action: str,
    subject: str,
    at_ns: int,
    **detail: int,
) -> None:
    audit_log.record(connection, at_ns=at_ns, by=by, account_id=account_id, action=action, subject=subject, **detail)


def _usage_lines(connection: sa.Connection, account_id: str, month: str) -> tuple[InvoiceLine, ...]:
    late = (usage_events.c.started_at_ns < month_bounds(month)[0]).label("late")
    requests = sa.func.count().label("requests")
    columns = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost_nano")
    query = (
        sa.select(
            late,
            usage_events.c.model,
            prices.c.input_nano_per_m,
            prices.c.cached_input_nano_per_m,
            prices.c.output_nano_per_m,
            prices.c.tier,
            prices.c.request_nano,
            requests,
            *(sa.func.sum(usage_events.c[name]).label(name) for name in columns),
        )
        .join_from(ledger_transactions, usage_events, _books(usage_events.c.id))
        .join(prices, prices.c.version == usage_events.c.price_version)
        .where(ledger_transactions.c.account_id == account_id, ledger_transactions.c.month == month)
        .group_by(late, usage_events.c.model, prices.c.version)
        .order_by(late, usage_events.c.model, prices.c.version)
    )
    return tuple(
        InvoiceLine(
            kind=LineKind.LATE_USAGE if row["late"] else LineKind.USAGE,
            model=row["model"],
            requests=row["requests"],
            prompt_tokens=int(row["prompt_tokens"]),
            cached_tokens=int(row["cached_tokens"]),
            completion_tokens=int(row["completion_tokens"]),
            reasoning_tokens=int(row["reasoning_tokens"]),
            input_nano_per_m=row["input_nano_per_m"],
            cached_input_nano_per_m=_or(row["cached_input_nano_per_m"], row["input_nano_per_m"]),
            output_nano_per_m=row["output_nano_per_m"],
            amount_nano=int(row["cost_nano"]),
            tier=row["tier"],
            request_nano=row["request_nano"],
        )
        for row in connection.execute(query).mappings()
    )


def _refund_lines(connection: sa.Connection, account_id: str, month: str) -> tuple[InvoiceLine, ...]:
    """Requests that were charged, in this month or an earlier one, and taken back in this one."""
    reversals, original = ledger_transactions, ledger_transactions.alias("original")
    columns = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost_nano")
    query = (
        sa.select(
            usage_events.c.model,
            sa.func.count().label("requests"),
            *(sa.func.sum(usage_events.c[name]).label(name) for name in columns),
        )
        .join_from(reversals, original, original.c.source == reversals.c.reverses)
        .join(usage_events, original.c.source == sa.literal(usage_source("")) + usage_events.c.id)
        .where(reversals.c.account_id == account_id, reversals.c.month == month)
        .group_by(usage_events.c.model)
        .order_by(usage_events.c.model)
    )
    return tuple(
        InvoiceLine(
            kind=LineKind.REFUND,
            model=row["model"],
            requests=row["requests"],
            prompt_tokens=int(row["prompt_tokens"]),
            cached_tokens=int(row["cached_tokens"]),
            completion_tokens=int(row["completion_tokens"]),
            reasoning_tokens=int(row["reasoning_tokens"]),
            input_nano_per_m=0,
            cached_input_nano_per_m=0,
            output_nano_per_m=0,
            amount_nano=-int(row["cost_nano"]),
        )
        for row in connection.execute(query).mappings()
    )


def _volume_line(adjustment: Adjustment) -> InvoiceLine:
    schedule = adjustment.schedule
    return InvoiceLine(
        kind=LineKind.VOLUME,
        model=schedule.place.model,
        requests=0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        reasoning_tokens=0,
        input_nano_per_m=0,
        cached_input_nano_per_m=0,
        output_nano_per_m=0,
        amount_nano=adjustment.amount_nano,
        tier=schedule.place.tier,
        volume=VolumeTerms(
            usage_month=adjustment.usage_month,
            token_class=schedule.token_class,
            tokens=adjustment.tokens,
            mode=schedule.mode,
            bands=tuple((band.tokens_from, band.nano_per_m) for band in schedule.bands),
        ),
    )


def _owed_nano(connection: sa.Connection, account_id: str, month: str) -> int:
    """What the month's usage and refunds left on the receivable; the rest was paid from grants and the wallet."""
    earned = (
        sa.select(ledger_entries.c.source)
        .join(ledger_transactions, ledger_transactions.c.source == ledger_entries.c.source)
        .where(
            ledger_transactions.c.account_id == account_id,
            ledger_transactions.c.month == month,
            ledger_transactions.c.kind.in_((TransactionKind.USAGE.value, TransactionKind.REVERSAL.value)),
            ledger_entries.c.ledger_account_id == REVENUE.id,
        )
    )
    query = (
        sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_nano), 0))
        .join(ledger_accounts, ledger_accounts.c.id == ledger_entries.c.ledger_account_id)
        .where(ledger_entries.c.source.in_(earned), ledger_accounts.c.kind == LedgerAccountKind.RECEIVABLE.value)
    )
    return -int(connection.scalar(query) or 0)


def _rounding(invoice: Invoice) -> Transaction:
    """The customer owes the rounded sum from here on: what was rounded up is ours, what was rounded down our loss."""
    owes_more = invoice.rounding_nano
    return Transaction(
        source=f"rounding:{invoice.account_id}:{invoice.month}",
        kind=TransactionKind.ROUNDING,
        account_id=invoice.account_id,
        occurred_at_ns=month_bounds(invoice.month)[1] - 1,
        entries=moved(receivable_of(invoice.account_id), ROUNDING, owes_more),
        memo=f"invoice {invoice.name}",
        month=invoice.month,
    )


def _message(invoice: Invoice) -> Message:
    return Message(
        id=f"invoice-{invoice.name}",
        kind="invoice.issued",
        occurred_at=instant_text(invoice.issued_at_ns),
        data={
            "account_id": invoice.account_id,
            "number": invoice.number,
            "month": invoice.month,
            "total_usd": usd_decimal(invoice.total_nano),
            "due_usd": cents_text(invoice.due_cents),
        },
    )


def _books(request_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    return ledger_transactions.c.source == sa.literal(usage_source("")) + request_id


def _invoice_to(connection: sa.Connection, account_id: str) -> str:
    query = sa.select(billing_accounts.c.invoice_to).where(billing_accounts.c.account_id == account_id)
    return connection.scalar(query) or f"Account {account_id}"


def _packed(lines: tuple[InvoiceLine, ...]) -> str:
    return orjson.dumps(lines).decode()


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
