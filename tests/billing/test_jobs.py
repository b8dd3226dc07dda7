"""What billing does beside requests goes on, and trouble is said once."""

import asyncio

import structlog

from billing.former_spools import FormerSpools
from billing.invoices.store import list_invoices
from billing.jobs import BillingJobs, repeat
from billing.ledger.periods import month_bounds
from billing.price_book import set_price
from billing.settings import BillingSettings
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, price
from tests.billing.rows import event_row, post_rows
from tests.doubles.waiting import eventually
from tests.tenancy.clock import SettableClock

HOUR_NS = 3_600 * 10**9


async def test_a_month_is_closed_so_many_hours_after_its_end_where_the_operator_asks_for_it(database: Database) -> None:
    begins, ends = month_bounds("2026-10")
    with database.write() as connection:
        set_price(connection, price())
    post_rows(database, event_row(started_at_ns=begins))
    clock = SettableClock(ends + 2 * HOUR_NS)
    former = FormerSpools(list, database, BillingSettings())
    BillingJobs(database, BillingSettings(), former, clock=clock)._close_due()
    jobs = BillingJobs(database, BillingSettings(invoice_after_hours=3), former, clock=clock)
    jobs._close_due()
    assert list_invoices(database, ACCOUNT) == []
    clock.now_ns = ends + 4 * HOUR_NS
    jobs._close_due()
    assert len(list_invoices(database, ACCOUNT)) == 1


async def test_trouble_is_logged_once_until_it_is_over() -> None:
    outcomes = ["bad", "bad", "well", "bad"]

    async def deed() -> None:
        if outcomes and outcomes.pop(0) == "bad":
            raise OSError("away")

    with structlog.testing.capture_logs() as logs:
        loop = asyncio.create_task(repeat("try", deed, 0.001), name="repeated")
        await eventually(lambda: not outcomes, what="every outcome")
        loop.cancel()
    assert [(line["event"], line["deed"]) for line in logs] == [("can't do it now", "try")] * 2
