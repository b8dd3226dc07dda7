"""GET …/credits and …/invoices: what an account has, owes and was booked, and its closed months."""

import asyncio
import time
from typing import Annotated, Final

from pydantic import BaseModel, BeforeValidator
from starlette.responses import Response

from api.console.invoices import shown
from api.console.schemas import InvoiceQuery, SourceCursor, parse_query
from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from api.errors import PageUnknown
from billing.invoices.store import list_invoices, read_invoice
from billing.ledger.statement import read_statement
from tenancy.provisioning import get_account

_PAGE: Final = 50


class LedgerQuery(BaseModel):
    before: Annotated[SourceCursor, BeforeValidator(lambda value: value or None)] = None


class MoneyPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def credits(self, visit: Visit) -> Response:
        services, database = visit.services, visit.services.database
        query = parse_query(LedgerQuery, dict(visit.request.query_params))
        await services.metering.flush()
        now_ns = time.time_ns()
        wallet = await database.call(services.wallets.show, visit.account_id)
        lines = await database.call(read_statement, database, visit.account_id, _PAGE, query.before)
        return self._pages.page(
            visit,
            "credits.html.j2",
            here="credits",
            title="Credits & ledger",
            as_of_ns=now_ns,
            wallet=wallet,
            account=await database.call(get_account, database, visit.account_id),
            lines=lines,
            now_ns=now_ns,
            first_page=query.before is None,
            onward=f"{lines[-1].posted_at_ns}.{lines[-1].source}" if len(lines) == _PAGE else "",
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
