"""`pagegate invoices`: close months, and show what they came to. Thin: the work is billing/invoices'."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, open_session, print_record, print_rows, time_text
from api.console.schemas import InvoiceFormat
from api.settings import load_settings
from billing.invoices.close import MonthClose
from billing.invoices.csv_lines import render_csv
from billing.invoices.document import Invoice, cents_text
from billing.invoices.html import render_html
from billing.invoices.store import list_invoices, read_invoice
from billing.ledger.wallet import Wallets
from billing.money import usd_decimal
from tenancy import provisioning

app = typer.Typer(help="Close months, and show their invoices.", no_args_is_help=True)


@app.command("close")
def close_command(
    through: Annotated[str, typer.Argument(metavar="MONTH", help="Such as 2026-11: it and all before it.")],
    *,
    account_id: Annotated[str | None, typer.Option("--account", help="Only this account.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Close months that have ended: nothing more is booked in them. Doing it again finishes what was interrupted."""
    seller = load_settings().billing.invoice_seller
    with open_session() as session:
        if account_id is not None:
            provisioning.get_account(session.database, account_id)
        try:
            closed = MonthClose(session.database, seller=seller, clock=time.time_ns).close(through, account_id)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    record = {"months_closed": closed.months, "invoices_written": closed.invoices, "months_sealed": closed.sealed}
    print_record("Closed", record, as_json=as_json)


@app.command("list")
def list_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """List an account's invoices, newest first."""
    with open_session() as session:
        provisioning.get_account(session.database, account_id)
        rows = [_row(invoice) for invoice in list_invoices(session.database, account_id)]
    print_rows("Invoices", rows, columns=("number", "month", "issued_at", "total_usd", "due_usd"), as_json=as_json)


@app.command("show")
def show_command(
    account_id: AccountId,
    number: Annotated[int, typer.Argument(help="Of an invoice in the list.")],
    *,
    form: Annotated[InvoiceFormat, typer.Option("--format", help="What to write.")] = InvoiceFormat.CSV,
    output: Annotated[Path | None, typer.Option(help="A file.", show_default="standard output")] = None,
) -> None:
    """Write one invoice."""
    with open_session() as session:
        invoice = read_invoice(session.database, account_id, number)
    if form is InvoiceFormat.JSON:
        print_record("Invoice", _row(invoice), as_json=True)
        return
    if form is InvoiceFormat.PDF:
        from billing.invoices.pdf import render_pdf  # noqa: PLC0415  brings fonts and numpy, which no other command needs

        document = render_pdf(invoice)
    else:
        document = (render_html if form is InvoiceFormat.HTML else render_csv)(invoice).encode()
    if output is None:
        sys.stdout.buffer.write(document)
    else:
        output.write_bytes(document)


@app.command("address")
def address_command(
    account_id: AccountId,
    text: Annotated[str, typer.Argument(help="Name and address; lines are parted by \\n.", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Set whom an account's invoices are made out to, from now on."""
    address = text.replace("\\n", "\n")
    with open_session() as session:
        provisioning.get_account(session.database, account_id)
        Wallets(session.database, clock=time.time_ns).set_invoice_to(account_id, address)
    print_record("Address", {"account_id": account_id, "invoice_to": address}, as_json=as_json)


def _row(invoice: Invoice) -> dict[str, Any]:
    return {
        "number": invoice.name,
        "month": invoice.month,
        "issued_at": time_text(invoice.issued_at_ns),
        "total_usd": usd_decimal(invoice.total_nano),
        "paid_from_credit_usd": usd_decimal(invoice.paid_nano),
        "rounding_usd": usd_decimal(invoice.rounding_nano),
        "due_usd": cents_text(invoice.due_cents),
    }
