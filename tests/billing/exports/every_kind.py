"""FOCUS rows of every kind: each class, requests, rounding, late usage, a refund, a volume's adjustment."""

from pathlib import Path

from billing.exports.focus import FocusIssuer, Row, focus_rows
from billing.invoices.close import MonthClose
from billing.ledger.periods import month_bounds
from billing.ledger.wallet import Wallets
from billing.price_book import set_price
from billing.rating import rate
from billing.usage import TokenUsage
from billing.volume_prices import set_volume_price
from tenancy.database import Database, open_database
from tenancy.migrations import upgrade_schema
from tests.billing.builders import ACCOUNT, price
from tests.billing.rows import event_row, post_rows
from tests.billing.test_volume_prices import volume_price
from tests.tenancy.clock import SettableClock

OCTOBER, NOVEMBER = month_bounds("2026-10"), month_bounds("2026-11")
_PRICE = price(
    input_nano_per_m=333_333_331, cached_input_nano_per_m=77_777, output_nano_per_m=1_999_999_999, request_nano=77
)


def fill(database: Database) -> None:
    """A closed October, and what came of it after."""
    clock = SettableClock(OCTOBER[0])
    with database.write() as connection:
        set_price(connection, _PRICE)
        set_volume_price(connection, volume_price((0, 1_999_999_999), (30, 1_111_111_111)), clock=clock)
    close = MonthClose(database, seller="Seller", clock=clock)
    post_rows(database, *(_request(f"r{number}", number) for number in range(20)))
    clock.now_ns = NOVEMBER[0]
    close.close("2026-10")
    post_rows(database, _request("late", 3))
    Wallets(database, clock=clock).reverse(ACCOUNT, "usage:r7")
    clock.now_ns = NOVEMBER[1]
    close.close("2026-11")


def rows_of_every_kind(folder: Path) -> list[Row]:
    """Of a new database in the folder."""
    database = open_database(f"sqlite:///{folder}/focus.db")
    upgrade_schema(database.engine)
    fill(database)
    found = focus_rows(database, ACCOUNT, *OCTOBER, account_name="acme", issuer=FocusIssuer("Seller"))
    rows = list(found)
    database.close()
    return rows


def _request(request_id: str, number: int) -> dict[str, object]:
    usage = TokenUsage(prompt=11 + number, cached=number, completion=7 * number + 1, reasoning=number)
    charge = rate(usage, _PRICE)
    return event_row(
        id=request_id,
        started_at_ns=OCTOBER[0] + number,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        completion_tokens=usage.completion,
        reasoning_tokens=usage.reasoning,
        cost_nano=charge.cost_nano,
        neurons_micro=charge.neurons_micro,
    )
