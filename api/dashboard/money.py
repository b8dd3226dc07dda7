"""…/credits and …/invoices: what an account has, owes and was booked, its closed months; operators book money here."""

import asyncio
import secrets
import time
from functools import partial
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator
from starlette.responses import RedirectResponse, Response

from api.console.invoices import shown
from api.console.schemas import InvoiceQuery, SourceCursor, parse_query
from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from api.errors import PageUnknown
from billing.errors import IdempotencyMismatch, LedgerConflict
from billing.invoices.store import list_invoices, read_invoice
from billing.ledger.statement import read_statement
from billing.money import parse_usd
from tenancy.provisioning import get_account

_PAGE: Final = 50


class LedgerQuery(BaseModel):
    before: Annotated[SourceCursor, BeforeValidator(lambda value: value or None)] = None


class MoneyPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def credits(self, visit: Visit) -> Response:
        return await self._credits(visit)

    async def book(self, visit: Visit) -> Response:
        """Money that came in, to the balance or for invoices. A form that is sent twice books once."""
        form, wallets = visit.form, visit.services.wallets
        receive = wallets.pay if form.get("kind") == "payment" else wallets.top_up
        try:
            amount_nano = parse_usd(form.get("amount", ""))
        except ValueError:
            return await self._credits(visit, fault="An amount is in USD, such as 250.00.", status=400)
        deed = partial(
            receive, idempotency_key=form.get("booking", ""), memo=form.get("memo", "").strip() or None, by=visit.actor
        )
        try:
            await visit.services.database.call(deed, visit.account_id, amount_nano)
        except (LedgerConflict, IdempotencyMismatch) as error:
            return await self._credits(visit, fault=str(error), status=400)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/credits", 303)

    async def _credits(self, visit: Visit, *, fault: str = "", status: int = 200) -> Response:
        services, database = visit.services, visit.services.database
        query = parse_query(LedgerQuery, dict(visit.request.query_params))
        await services.settled()
        now_ns = time.time_ns()
        wallet = await database.call(services.wallets.show, visit.account_id)
        lines = await database.call(read_statement, database, visit.account_id, _PAGE, query.before)
        return self._pages.page(
            visit,
            "credits.html.j2",
            here="credits",
            title="Credits & ledger",
            as_of_ns=now_ns,
            status=status,
            wallet=wallet,
            account=await database.call(get_account, database, visit.account_id),
            lines=lines,
            now_ns=now_ns,
            first_page=query.before is None,
            onward=f"{lines[-1].posted_at_ns}.{lines[-1].source}" if len(lines) == _PAGE else "",
            booking=f"dashboard-{secrets.token_hex(16)}",
            fault=fault,
            form=visit.form if fault else {},
        )

    async def invoices(self, visit: Visit) -> Response:
        database = visit.services.database
        found = await database.call(list_invoices, database, visit.account_id)
        return self._pages.page(visit, "invoices.html.j2", here="invoices", title="Invoices", invoices=found)

    async def invoice(self, visit: Visit) -> Response:
        """One document: a page, PDF or CSV, as the API gives it."""
        query = parse_query(InvoiceQuery, dict(visit.request.query_params))
        number = visit.request.path_params["number"]
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise PageUnknown
        database = visit.services.database
        invoice = await database.call(read_invoice, database, visit.account_id, int(number))
        return await asyncio.to_thread(shown, invoice, query.format)
