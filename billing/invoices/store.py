"""Reads invoices that are written. The console and the command line ask; every question names an account.

Synchronous: callers on an event loop run it through `Database.call`.
"""

from typing import Any

import orjson
import sqlalchemy as sa

from billing.errors import InvoiceNotFound
from billing.invoices.document import Invoice, InvoiceLine, LineKind, VolumeTerms
from billing.tables import invoices
from tenancy.database import Database

_LISTED_MAX = 1_200  # a hundred years of months


def list_invoices(database: Database, account_id: str) -> list[Invoice]:
    """The account's invoices, newest first."""
    query = (
        sa.select(invoices)
        .where(invoices.c.account_id == account_id)
        .order_by(invoices.c.month.desc())
        .limit(_LISTED_MAX)
    )
    with database.read() as connection:
        return [_invoice(row) for row in connection.execute(query).mappings()]


def read_invoice(database: Database, account_id: str, number: int) -> Invoice:
    """Raises InvoiceNotFound for an unknown one and another account's alike."""
    query = sa.select(invoices).where(invoices.c.account_id == account_id, invoices.c.number == number)
    with database.read() as connection:
        row = connection.execute(query).mappings().first()
    if row is None:
        raise InvoiceNotFound("There is no such invoice in this account.")
    return _invoice(row)


def _invoice(row: sa.RowMapping) -> Invoice:
    return Invoice(**dict(row) | {"lines": tuple(map(_line, orjson.loads(row["lines"])))})


def _line(kept: dict[str, Any]) -> InvoiceLine:
    terms = kept.get("volume")
    if terms is not None:
        terms = VolumeTerms(**terms | {"bands": tuple(map(tuple, terms["bands"]))})
    return InvoiceLine(**kept | {"kind": LineKind(kept["kind"]), "volume": terms})
