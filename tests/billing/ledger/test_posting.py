"""A request is posted once, whoever posts it and however often."""

from concurrent.futures import ThreadPoolExecutor

from billing.audit import violations
from billing.ledger.posting import post_usage
from billing.price_book import set_price
from billing.store import UsageStore
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, price
from tests.billing.rows import event_row
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases


def test_the_same_batch_posted_by_several_at_once_counts_once(database: Database) -> None:
    with database.write() as connection:
        set_price(connection, price())
    rows = [event_row(id=f"r{number}") for number in range(50)]

    def post(shift: int) -> int:
        turned = rows[shift:] + rows[:shift]
        with database.write() as connection:
            return len(post_usage(connection, turned, 5_000))

    with ThreadPoolExecutor(4) as threads:
        fresh = list(threads.map(post, range(0, 40, 10)))
    assert sum(fresh) == 50
    totals = UsageStore(database).usage_summary(ACCOUNT, 0, 2**62).totals
    assert (totals.requests, totals.cost_nano) == (50, 50 * 1_010_000)
    assert violations(database) == []
