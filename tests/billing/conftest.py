"""A migrated database, a price of the model that the tests use, and records built with few words."""

import pytest

from billing.price_book import PriceBook, set_price
from tenancy.database import Database
from tests.billing.builders import price
from tests.tenancy.conftest import clock, database, database_url, migrated_file

__all__ = ["clock", "database", "database_url", "migrated_file"]


@pytest.fixture
async def price_book(database: Database) -> PriceBook:
    with database.write() as connection:
        set_price(connection, price())
    book = PriceBook(database)
    await book.refresh()
    return book
