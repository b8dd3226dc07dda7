"""GET /console/v1/accounts/{account_id}/invoices[/{number}]: an account's invoices, for its own admin keys.

One is JSON, or a document with `?format=html`, `pdf` or `csv`. The operator's command line or `invoice_after_hours`
writes them.
"""

import asyncio
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.auth import owned
from api.console.accounts import iso
from api.console.schemas import InvoiceFormat, InvoiceQuery, read_query
from api.services import Services
from billing.errors import InvoiceNotFound
from billing.invoices.csv_lines import render_csv
from billing.invoices.document import Invoice, InvoiceLine, VolumeTerms, cents_text
from billing.invoices.html import render_html
from billing.invoices.store import list_invoices, read_invoice
from billing.money import usd_decimal
from tenancy.principal import Scope

_NUMBER_DIGITS_MAX = 9
# The page is its own document: nothing in it runs or loads anything.
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


class InvoiceRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_invoices(self, request: Request) -> Response:
        """Newest first."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        database = self._services.database
        found = await database.call(list_invoices, database, principal.account_id)
        return _json({"invoices": [_summary(invoice) for invoice in found]})

    async def one_invoice(self, request: Request) -> Response:
        """404 for an unknown one and another account's alike."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        query = read_query(InvoiceQuery, request)
        number = request.path_params["number"]
        if not number.isascii() or not number.isdigit() or len(number) > _NUMBER_DIGITS_MAX:
            raise InvoiceNotFound("There is no such invoice in this account.")
        database = self._services.database
        invoice = await database.call(read_invoice, database, principal.account_id, int(number))
        return await asyncio.to_thread(shown, invoice, query.format)


def shown(invoice: Invoice, form: InvoiceFormat) -> Response:
    """The invoice as JSON, page, PDF or CSV. Takes a tenth of a second for a PDF: not for an event loop."""
    if form is InvoiceFormat.JSON:
        return _json({**_summary(invoice), "lines": [_line(line) for line in invoice.lines]})
    if form is InvoiceFormat.HTML:
        return Response(render_html(invoice), media_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})
    name = f"pagegate-invoice-{invoice.name}.{form.value}"
    attached = {"Content-Disposition": f'attachment; filename="{name}"'}
    if form is InvoiceFormat.CSV:
        return Response(render_csv(invoice), media_type="text/csv", headers=attached)
    from billing.invoices.pdf import render_pdf  # noqa: PLC0415  brings fonts and numpy: a fifth of a start

    return Response(render_pdf(invoice), media_type="application/pdf", headers=attached)


def _summary(invoice: Invoice) -> dict[str, Any]:
    return {
        "number": invoice.number,
        "name": invoice.name,
        "month": invoice.month,
        "issued_at": iso(invoice.issued_at_ns),
        "currency": "USD",
        "total": usd_decimal(invoice.total_nano),
        "paid_from_credit": usd_decimal(invoice.paid_nano),
        "rounding": usd_decimal(invoice.rounding_nano),
        "due": cents_text(invoice.due_cents),
        "due_cents": invoice.due_cents,
    }


def _line(line: InvoiceLine) -> dict[str, Any]:
    return {
        "kind": line.kind.value,
        "model": line.model,
        "requests": line.requests,
        "prompt_tokens": line.prompt_tokens,
        "cached_tokens": line.cached_tokens,
        "completion_tokens": line.completion_tokens,
        "reasoning_tokens": line.reasoning_tokens,
        "input_usd_per_m": usd_decimal(line.input_nano_per_m),
        "cached_input_usd_per_m": usd_decimal(line.cached_input_nano_per_m),
        "output_usd_per_m": usd_decimal(line.output_nano_per_m),
        "amount": usd_decimal(line.amount_nano),
        "amount_nano": line.amount_nano,
        "tier": line.tier,
        "request_usd": usd_decimal(line.request_nano),
        "volume": None if line.volume is None else _volume(line.volume),
    }


def _volume(terms: VolumeTerms) -> dict[str, Any]:
    return {
        "month": terms.usage_month,
        "token_class": terms.token_class,
        "tokens": terms.tokens,
        "mode": terms.mode,
        "bands": [{"tokens_from": start, "usd_per_m": usd_decimal(nano)} for start, nano in terms.bands],
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
