"""An invoice holds what its month came to, once; what comes later is on the next one."""

import pytest
import sqlalchemy as sa

from billing.audit import violations
from billing.errors import InvoiceNotFound
from billing.invoices.close import Closed, MonthClose
from billing.invoices.document import Invoice, LineKind
from billing.invoices.seal import prove_months
from billing.invoices.store import list_invoices, read_invoice
from billing.ledger.payers import AccountMode
from billing.ledger.periods import month_bounds
from billing.ledger.wallet import Wallets
from billing.price_book import set_price
from billing.tables import ledger_entries, usage_events
from tenancy.audit_log import SERVICE, read_audit_log, verify
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, MODEL, OTHER_ACCOUNT, price
from tests.billing.rows import event_row, post_rows
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

COST = 1_010_000  # of the default row: a tenth of a cent and a bit
OCTOBER, NOVEMBER = month_bounds("2026-10"), month_bounds("2026-11")
DAY = 86_400 * 10**9


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock(NOVEMBER[0] + DAY)


@pytest.fixture
def wallets(database: Database, clock: SettableClock) -> Wallets:
    with database.write() as connection:
        set_price(connection, price())
    return Wallets(database, clock=clock)


@pytest.fixture
def month_close(database: Database, wallets: Wallets, clock: SettableClock) -> MonthClose:
    assert wallets
    return MonthClose(database, seller="Seller\nStreet 1", clock=clock)


def only_invoice(database: Database, account: str = ACCOUNT) -> Invoice:
    (invoice,) = list_invoices(database, account)
    return invoice


def test_a_month_is_a_line_per_model_and_price(database: Database, month_close: MonthClose) -> None:
    post_rows(
        database,
        *(event_row(id=f"r{number}", started_at_ns=OCTOBER[0] + number) for number in range(3)),
        event_row(id="after", started_at_ns=OCTOBER[1]),
        event_row(id="free", started_at_ns=OCTOBER[0], charged=False, cost_nano=0, neurons_micro=0),
    )
    assert month_close.close("2026-10") == Closed(1, 1, 1)
    invoice = only_invoice(database)
    (line,) = invoice.lines
    assert (line.kind, line.model, line.requests, line.amount_nano) == (LineKind.USAGE, MODEL, 3, 3 * COST)
    assert (line.prompt_tokens, line.completion_tokens) == (30, 300)
    assert (line.input_nano_per_m, line.output_nano_per_m) == (1_000_000_000, 10_000_000_000)
    assert (invoice.number, invoice.month, invoice.seller) == (1, "2026-10", "Seller\nStreet 1")
    assert invoice.buyer == f"Account {ACCOUNT}"


def test_what_is_owed_afterwards_is_what_is_due_in_cents(
    database: Database, month_close: MonthClose, wallets: Wallets
) -> None:
    post_rows(database, *(event_row(id=f"r{number}", started_at_ns=OCTOBER[0]) for number in range(15)))
    month_close.close("2026-10")
    invoice = only_invoice(database)
    assert (invoice.total_nano, invoice.due_cents, invoice.rounding_nano) == (15 * COST, 2, 2 * 10**7 - 15 * COST)
    assert wallets.show(ACCOUNT).owed_nano == 2 * 10**7
    wallets.pay(ACCOUNT, 2 * 10**7, idempotency_key="bank-1")
    assert wallets.show(ACCOUNT).owed_nano == 0
    assert violations(database) == []


def test_closing_again_changes_nothing(database: Database, month_close: MonthClose) -> None:
    post_rows(database, event_row(started_at_ns=OCTOBER[0]))
    month_close.close("2026-10")
    before = only_invoice(database)
    assert month_close.close("2026-10") == Closed(0, 0, 0)
    assert only_invoice(database) == before


def test_late_usage_is_a_line_of_its_own_on_the_next_invoice(
    database: Database, month_close: MonthClose, clock: SettableClock
) -> None:
    post_rows(database, event_row(started_at_ns=OCTOBER[0]))
    month_close.close("2026-10")
    post_rows(
        database, event_row(id="late", started_at_ns=OCTOBER[0]), event_row(id="on time", started_at_ns=NOVEMBER[0])
    )
    clock.now_ns = NOVEMBER[1]
    month_close.close("2026-11")
    november, october = list_invoices(database, ACCOUNT)
    assert [(line.kind, line.requests) for line in october.lines] == [(LineKind.USAGE, 1)]
    assert sorted((line.kind.value, line.requests) for line in november.lines) == [("late_usage", 1), ("usage", 1)]


def test_a_refund_after_the_close_is_on_the_next_invoice(
    database: Database, month_close: MonthClose, wallets: Wallets, clock: SettableClock
) -> None:
    post_rows(database, *(event_row(id=f"r{number}", started_at_ns=OCTOBER[0]) for number in range(20)))
    month_close.close("2026-10")
    for number in range(20):
        wallets.reverse(ACCOUNT, f"usage:r{number}")
    clock.now_ns = NOVEMBER[1]
    month_close.close("2026-11")
    november, october = list_invoices(database, ACCOUNT)
    assert october.due_cents == 2
    assert [(line.kind, line.requests, line.amount_nano) for line in november.lines] == [
        (LineKind.REFUND, 20, -20 * COST)
    ]
    assert november.due_cents == -2
    assert wallets.show(ACCOUNT).owed_nano == 0
    assert violations(database) == []


def test_what_a_prepaid_account_paid_from_credit_is_not_due(
    database: Database, month_close: MonthClose, wallets: Wallets
) -> None:
    wallets.set_mode(OTHER_ACCOUNT, AccountMode.PREPAID)
    wallets.top_up(OTHER_ACCOUNT, 10**9, idempotency_key="t")
    wallets.grant(OTHER_ACCOUNT, COST // 2, idempotency_key="g")
    wallets.set_invoice_to(OTHER_ACCOUNT, "Buyer & Sons\nRoad 2")
    post_rows(database, event_row(account_id=OTHER_ACCOUNT, started_at_ns=OCTOBER[0]))
    month_close.close("2026-10")
    invoice = only_invoice(database, OTHER_ACCOUNT)
    assert (invoice.total_nano, invoice.paid_nano, invoice.rounding_nano, invoice.due_cents) == (COST, COST, 0, 0)
    assert invoice.buyer == "Buyer & Sons\nRoad 2"
    assert wallets.show(OTHER_ACCOUNT).wallet_nano == 10**9 - (COST - COST // 2)


def test_an_account_that_only_paid_in_gets_no_invoice(
    database: Database, month_close: MonthClose, wallets: Wallets, clock: SettableClock
) -> None:
    clock.now_ns = OCTOBER[0]
    wallets.top_up(ACCOUNT, 500, idempotency_key="t")
    clock.now_ns = NOVEMBER[0]
    assert month_close.close("2026-10") == Closed(1, 0, 1)
    assert list_invoices(database, ACCOUNT) == []


def test_numbers_have_no_gaps(database: Database, month_close: MonthClose) -> None:
    accounts = [f"{number:032x}" for number in range(5)]
    post_rows(database, *(event_row(id=account, account_id=account, started_at_ns=OCTOBER[0]) for account in accounts))
    month_close.close("2026-10", accounts[3])
    month_close.close("2026-10")
    numbers = [only_invoice(database, account).number for account in accounts]
    assert sorted(numbers) == [1, 2, 3, 4, 5]
    assert numbers[3] == 1


def test_a_month_that_runs_can_not_be_closed(month_close: MonthClose) -> None:
    with pytest.raises(ValueError, match="has not ended"):
        month_close.close("2026-11")


def test_another_accounts_invoice_is_as_unknown_as_none(database: Database, month_close: MonthClose) -> None:
    post_rows(database, event_row(started_at_ns=OCTOBER[0]))
    month_close.close("2026-10")
    assert read_invoice(database, ACCOUNT, 1).number == 1
    for account, number in ((OTHER_ACCOUNT, 1), (ACCOUNT, 2)):
        with pytest.raises(InvoiceNotFound):
            read_invoice(database, account, number)


def test_a_close_that_was_killed_before_the_seal_is_finished_by_the_next(
    database: Database, month_close: MonthClose, monkeypatch: pytest.MonkeyPatch
) -> None:
    post_rows(database, *(event_row(id=f"r{number}", started_at_ns=OCTOBER[0]) for number in range(15)))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("billing.invoices.close.seal_month", die)
        with pytest.raises(KeyboardInterrupt):
            month_close.close("2026-10")
    assert month_close.close("2026-10") == Closed(0, 0, 1)
    assert only_invoice(database).due_cents == 2
    assert [proof.holds for proof in prove_months(database)] == [True]
    assert violations(database) == []


class TestSeal:
    @pytest.fixture
    def sealed(self, database: Database, month_close: MonthClose, clock: SettableClock) -> Database:
        post_rows(database, event_row(started_at_ns=OCTOBER[0]), event_row(id="r2", started_at_ns=NOVEMBER[0]))
        clock.now_ns = NOVEMBER[1]
        month_close.close("2026-11")
        return database

    def test_it_holds_while_nothing_is_changed(self, sealed: Database, wallets: Wallets) -> None:
        wallets.top_up(ACCOUNT, 1, idempotency_key="later")
        post_rows(sealed, event_row(id="late", started_at_ns=OCTOBER[0]))
        proofs = list(prove_months(sealed))
        # The usage and its rounding to cents.
        assert [(proof.month, proof.holds, proof.now.transactions) for proof in proofs] == [
            ("2026-10", True, 2),
            ("2026-11", True, 2),
        ]

    @pytest.mark.parametrize("table", [usage_events, ledger_entries])
    def test_a_changed_month_is_found_and_so_is_what_rests_on_it(self, sealed: Database, table: sa.Table) -> None:
        column, mine = (
            (table.c.completion_tokens, table.c.id == "request-1")
            if table is usage_events
            else (table.c.amount_nano, table.c.source == "usage:request-1")
        )
        with sealed.write() as connection:
            connection.execute(table.update().where(mine).values({column: column + 1}))
        assert [proof.holds for proof in prove_months(sealed, "2026-10")] == [False]

    def test_a_seal_that_was_set_anew_breaks_the_next_one(self, sealed: Database) -> None:
        with sealed.write() as connection:
            connection.execute(sa.text("UPDATE ledger_periods SET digest = 'forged' WHERE month = '2026-10'"))
        assert [proof.holds for proof in prove_months(sealed, "2026-11")] == [False]


def test_the_audit_log_says_who_closed_a_month_and_which_invoice_came_of_it(
    database: Database, month_close: MonthClose
) -> None:
    post_rows(database, event_row(started_at_ns=OCTOBER[0]))
    month_close.close("2026-10", by=SERVICE)
    month_close.close("2026-10")
    entries = read_audit_log(database, None)[:-1]  # the oldest is the price
    assert [(entry.action, entry.subject, entry.actor_kind) for entry in entries] == [
        ("invoice.write", "2026-10", "service"),
        ("month.close", "2026-10", "service"),
    ]
    assert [entry.detail for entry in read_audit_log(database, ACCOUNT)] == ['{"due_cents":0,"number":1}']
    assert verify(database).broken == ()
