"""Each threshold of a budget is told once a period, in order, however fast it is passed."""

import json

import pytest

from billing.alerts import Exhausted, alert_spending
from billing.budgets import BudgetPeriod, Budgets
from billing.credit.process import ProcessCredit
from billing.credit.protocol import Spending
from billing.errors import BudgetExceeded
from billing.ledger.periods import month_bounds
from billing.ledger.posting import post_usage
from billing.price_book import set_price
from billing.rollups import DAY_NS
from billing.webhooks.endpoints import Endpoints
from tenancy.database import Database
from tenancy.key_groups import KeyGroups
from tests.billing.builders import ACCOUNT, KEY, MODEL, OTHER_ACCOUNT, price
from tests.billing.rows import event_row
from tests.billing.webhooks.receiver import LOOPBACK
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

COST = 1_010_000
NOW, NEXT = month_bounds("2026-11")


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOW)


@pytest.fixture
def budgets(database: Database, clock: SettableClock) -> Budgets:
    """An account with an endpoint, and budgets to be set."""
    with database.write() as connection:
        set_price(connection, price())
    Endpoints(database, allowed=LOOPBACK, clock=clock).add(ACCOUNT, "https://example.com/hook")
    return Budgets(database, clock=clock)


def spend(database: Database, count: int, at_ns: int = NOW, start: int = 0, **values: object) -> None:
    """So many requests of COST each, posted together as the drain does."""
    rows = [event_row(id=f"{at_ns}-{start + one}", started_at_ns=at_ns, **values) for one in range(count)]
    with database.write() as connection:
        post_usage(connection, rows, at_ns)
        alert_spending(connection, rows, at_ns)


def told(database: Database) -> list[int]:
    """The thresholds that wait in the outbox, in order."""
    with database.read() as connection:
        bodies = connection.exec_driver_sql("SELECT body FROM webhook_messages ORDER BY position").scalars()
        return [json.loads(body)["data"]["threshold_percent"] for body in bodies]


def test_each_threshold_is_told_as_it_is_reached(database: Database, budgets: Budgets) -> None:
    budgets.add(ACCOUNT, 10 * COST, BudgetPeriod.MONTH)
    for start in range(12):
        spend(database, 1, start=start)
    assert told(database) == [50, 80, 100]


def test_a_jump_over_several_tells_all_of_them_in_order(database: Database, budgets: Budgets) -> None:
    budgets.add(ACCOUNT, 10 * COST, BudgetPeriod.MONTH, hard=False)
    spend(database, 4)
    assert told(database) == []
    spend(database, 8, start=4)
    assert told(database) == [50, 80, 100]


def test_the_next_period_begins_anew(database: Database, budgets: Budgets) -> None:
    budgets.add(ACCOUNT, 10 * COST, BudgetPeriod.MONTH)
    spend(database, 5)
    spend(database, 5, at_ns=NEXT)
    spend(database, 5, at_ns=NEXT + DAY_NS)
    assert told(database) == [50, 50, 80, 100]


def test_posting_the_same_requests_again_tells_nothing_again(database: Database, budgets: Budgets) -> None:
    budgets.add(ACCOUNT, 10 * COST, BudgetPeriod.MONTH)
    for _ in range(3):
        spend(database, 9)
    assert told(database) == [50, 80]


def test_each_scope_is_told_for_itself(database: Database, budgets: Budgets) -> None:
    budgets.add(ACCOUNT, 100 * COST, BudgetPeriod.MONTH)
    budgets.add(ACCOUNT, 10 * COST, BudgetPeriod.DAY, key_id=KEY)
    budgets.add(ACCOUNT, 10 * COST, BudgetPeriod.TOTAL, model="another")
    spend(database, 5)
    assert told(database) == [50]


def test_another_account_is_not_told(database: Database, budgets: Budgets) -> None:
    budgets.add(OTHER_ACCOUNT, COST, BudgetPeriod.MONTH)
    spend(database, 5, account_id=OTHER_ACCOUNT)
    assert told(database) == []


async def test_a_refused_hold_tells_that_the_budget_is_used_up(
    database: Database, budgets: Budgets, clock: SettableClock
) -> None:
    budgets.add(ACCOUNT, 10 * COST, BudgetPeriod.MONTH)
    spend(database, 6)
    exhausted = Exhausted(database, clock=clock)

    async def flushed() -> None:
        return None

    credit = ProcessCredit(database, flushed, exhausted.note)
    spending = Spending(ACCOUNT, KeyGroups(KEY, ACCOUNT), MODEL, NOW, None)
    for request in ("a", "b"):
        with pytest.raises(BudgetExceeded):
            await credit.hold(spending, request, 5 * COST)
    await credit.hold(spending, "c", 4 * COST)
    assert not await credit.extend("c", COST)
    await database.call(exhausted.tell)
    await database.call(exhausted.tell)
    assert told(database) == [50, 80, 100]
