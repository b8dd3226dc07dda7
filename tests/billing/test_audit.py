"""Whatever contradicts the raw events is found: in the ledger, in its balances, in the rollups."""

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from billing.audit import violations
from billing.ledger.payers import AccountMode
from billing.ledger.wallet import Wallets
from billing.price_book import set_price
from billing.tables import ledger_accounts, ledger_entries, ledger_transactions, prices, usage_events, usage_rollups
from tenancy.database import Database
from tests.billing.builders import OTHER_ACCOUNT, price
from tests.billing.rows import event_row, post_rows
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases


@pytest.fixture
def booked(database: Database) -> Database:
    """Two accounts, prepaid and postpaid, with usage, a grant and a reversal: all sound."""
    with database.write() as connection:
        set_price(connection, price())
    wallets = Wallets(database, clock=lambda: 7_000)
    wallets.set_mode(OTHER_ACCOUNT, AccountMode.PREPAID)
    wallets.top_up(OTHER_ACCOUNT, 10**9, idempotency_key="t")
    wallets.grant(OTHER_ACCOUNT, 1_000, idempotency_key="g")
    post_rows(
        database,
        event_row(),
        event_row(id="free", charged=False, outcome="refused", cost_nano=0, neurons_micro=0),
        event_row(id="r2", account_id=OTHER_ACCOUNT),
        event_row(id="r3", account_id=OTHER_ACCOUNT),
    )
    wallets.reverse(OTHER_ACCOUNT, "usage:r3")
    assert violations(database) == []
    return database


Harm = Callable[[sa.Connection], object]


def _entry(source: str, amount_nano: int) -> Harm:
    mine = sa.and_(ledger_entries.c.source == source, ledger_entries.c.ledger_account_id == "revenue")
    return lambda connection: connection.execute(ledger_entries.update().where(mine).values(amount_nano=amount_nano))


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (_entry("usage:request-1", 1), "transaction usage:request-1: sums to -1009999"),
        (_entry("usage:request-1", 1), "request request-1: costs 1010000 nano-USD, the ledger books 1 nano-USD"),
        (_entry("usage:request-1", 1), "ledger account revenue: says"),
        (_entry("reversal:usage:r3", 5), "transaction reversal:usage:r3: is not the opposite of what it reverses"),
        (
            lambda connection: connection.execute(
                ledger_accounts.update().where(ledger_accounts.c.kind == "wallet").values(posted_nano=0)
            ),
            f"ledger account wallet:{OTHER_ACCOUNT}: says 0 nano-USD",
        ),
        (
            lambda connection: connection.execute(
                ledger_entries.delete().where(ledger_entries.c.source == "usage:request-1")
            ),
            "transaction usage:request-1: has no entries",
        ),
        (
            lambda connection: connection.execute(
                ledger_transactions.update()
                .where(ledger_transactions.c.source == "usage:request-1")
                .values(account_id=OTHER_ACCOUNT)
            ),
            "request request-1: costs 1010000 nano-USD",
        ),
        (
            lambda connection: connection.execute(usage_events.update().values(tier="batch")),
            "request request-1: was served as batch, its price is for standard",
        ),
        (
            lambda connection: connection.execute(prices.update().values(prompt_tokens_from=11)),
            "request request-1: its price is for prompts of at least 11 tokens",
        ),
        (
            lambda connection: connection.execute(prices.update().values(request_nano=1)),
            "request request-1: costs 1010000 nano-USD, its tokens come to 1010001",
        ),
        (
            lambda connection: connection.execute(usage_events.delete().where(usage_events.c.id == "request-1")),
            "transaction usage:request-1: there is no such request",
        ),
        (
            lambda connection: connection.execute(
                usage_rollups.update().where(usage_rollups.c.grain == "hour").values(requests=9)
            ),
            "the hour that begins at 0: account ",
        ),
        (
            lambda connection: connection.execute(usage_rollups.delete().where(usage_rollups.c.grain == "day")),
            "the day that begins at 0: account ",
        ),
    ],
)
def test_each_kind_of_contradiction_is_named(booked: Database, harm: Harm, found: str) -> None:
    with booked.write() as connection:
        harm(connection)
    assert any(text.startswith(found) for text in violations(booked)), violations(booked)


def test_a_cost_that_is_not_booked_is_found(booked: Database) -> None:
    with booked.write() as connection:
        connection.execute(usage_events.insert().values(event_row(id="r9")))
    assert "request r9: costs 1010000 nano-USD, the ledger books nothing for its account" in violations(booked)
