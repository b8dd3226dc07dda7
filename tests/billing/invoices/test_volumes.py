"""A month's volume is priced when it closes, and once more, by the difference, when more of it is known."""

from decimal import Decimal

import pytest
import sqlalchemy as sa

from billing.audit import violations
from billing.exports.focus import FocusIssuer, focus_rows
from billing.invoices.close import MonthClose
from billing.invoices.csv_lines import render_csv
from billing.invoices.document import Invoice, InvoiceLine, LineKind
from billing.invoices.html import render_html
from billing.invoices.seal import prove_months
from billing.invoices.store import list_invoices
from billing.ledger.payers import AccountMode
from billing.ledger.periods import month_bounds
from billing.ledger.wallet import Wallets
from billing.money import usd_decimal
from billing.price_book import Place, Tier, account_book, set_price
from billing.rating import rate
from billing.tables import ledger_accounts, volume_adjustments
from billing.usage import TokenUsage
from billing.volume_prices import TokenClass, VolumeMode, VolumePrice, set_volume_price
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, MODEL, OTHER_ACCOUNT, price
from tests.billing.rows import event_row, post_rows
from tests.billing.test_volume_prices import volume_price
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

OCTOBER, NOVEMBER, DECEMBER = (month_bounds(month) for month in ("2026-10", "2026-11", "2026-12"))
LIST = price(input_nano_per_m=333_333_331, cached_input_nano_per_m=77_777, output_nano_per_m=1_999_999_999)
# The first 250 outputs of a month at the price, the next 250 at half, the rest at a tenth: with odd last digits.
OUTPUTS = volume_price((0, 1_999_999_999), (250, 999_999_997), (500, 200_000_003))


class Books:
    """A database with one price, and deeds on it in October and later."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = SettableClock(OCTOBER[0])
        self.wallets = Wallets(database, clock=self.clock)
        self._close = MonthClose(database, seller="Seller", clock=self.clock)
        with database.write() as connection:
            set_price(connection, LIST)

    def price_by_volume(self, *schedules: VolumePrice) -> None:
        with self.database.write() as connection:
            for schedule in schedules:
                set_volume_price(connection, schedule, clock=self.clock)

    def use(self, request_id: str, usage: TokenUsage, started_at_ns: int = OCTOBER[0], **values: object) -> int:
        """Post a request; returns what it was charged."""
        cost_nano = rate(usage, LIST).cost_nano
        row = event_row(id=request_id, started_at_ns=started_at_ns, cost_nano=cost_nano)
        row |= {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "completion_tokens": usage.completion}
        row |= {"reasoning_tokens": usage.reasoning, "neurons_micro": rate(usage, LIST).neurons_micro} | values
        post_rows(self.database, row)
        return cost_nano

    def close(self, month: str) -> Invoice | None:
        """The month's invoice, if there is one; whatever happens, the books agree with each other."""
        self.clock.now_ns = max(self.clock.now_ns, month_bounds(month)[1])
        self._close.close(month)
        assert violations(self.database) == []
        assert all(proof.holds for proof in prove_months(self.database))
        return next((one for one in list_invoices(self.database, ACCOUNT) if one.month == month), None)


@pytest.fixture
def books(database: Database) -> Books:
    return Books(database)


def volume_lines(invoice: Invoice | None) -> list[InvoiceLine]:
    assert invoice is not None, "something was used"
    return [line for line in invoice.lines if line.kind is LineKind.VOLUME]


def nano(numerator: int) -> int:
    """Millionths of a nano-dollar to nano-dollars, half up, by another way than the code's."""
    whole, left = divmod(numerator, 10**6)
    return whole + (2 * left >= 10**6)


@pytest.mark.parametrize(
    ("mode", "numerator"),
    [
        (VolumeMode.GRADUATED, 250 * 1_999_999_999 + 250 * 999_999_997 + 101 * 200_000_003),
        (VolumeMode.VOLUME, 601 * 200_000_003),
    ],
)
def test_a_months_outputs_cost_what_their_bands_say_and_the_invoice_tells_them(
    books: Books, mode: VolumeMode, numerator: int
) -> None:
    books.price_by_volume(volume_price(*((one.tokens_from, one.nano_per_m) for one in OUTPUTS.bands), mode=mode))
    charged = sum(books.use(f"r{number}", TokenUsage(3, 1, count, 0)) for number, count in enumerate((200, 301, 100)))
    invoice = books.close("2026-10")
    (line,) = volume_lines(invoice)
    assert line.amount_nano == nano(numerator - 601 * 1_999_999_999) < 0
    assert line.volume is not None
    assert (line.volume.tokens, line.volume.token_class, line.volume.usage_month) == (601, "output", "2026-10")
    assert invoice is not None
    assert invoice.total_nano == charged + line.amount_nano
    assert f"{mode}: 1.999999999, from 250: 0.999999997, from 500: 0.200000003" in render_html(invoice)
    assert f"volume,{MODEL},0,0,0,0,0,0,0,0,{usd_decimal(line.amount_nano)}," in render_csv(invoice)
    with books.database.read() as connection:
        earned = sa.select(ledger_accounts.c.posted_nano).where(ledger_accounts.c.id == "revenue")
        assert connection.scalar(earned) == invoice.total_nano


def test_usage_that_comes_late_is_priced_in_its_own_months_volume(books: Books) -> None:
    books.price_by_volume(OUTPUTS)
    books.use("r1", TokenUsage(0, 0, 240, 0))
    assert volume_lines(books.close("2026-10")) == []
    books.use("late", TokenUsage(0, 0, 20, 0))
    books.use("on time", TokenUsage(0, 0, 100, 0), NOVEMBER[0])
    (line,) = volume_lines(books.close("2026-11"))
    assert line.volume is not None
    assert (line.volume.usage_month, line.volume.tokens) == ("2026-10", 260)
    assert line.amount_nano == nano(10 * (999_999_997 - 1_999_999_999))


def test_a_refund_takes_the_discount_of_its_month_back(books: Books) -> None:
    books.price_by_volume(OUTPUTS)
    for number in range(6):
        books.use(f"r{number}", TokenUsage(0, 0, 100, 0))
    first = books.close("2026-10")
    (given,) = volume_lines(first)
    for number in range(6):
        books.wallets.reverse(ACCOUNT, f"usage:r{number}")
    second = books.close("2026-11")
    (taken,) = volume_lines(second)
    assert taken.amount_nano == -given.amount_nano
    assert first is not None
    assert second is not None
    assert second.total_nano == -first.total_nano
    assert books.wallets.show(ACCOUNT).owed_nano == 0


def test_closing_again_and_a_month_without_news_adjust_nothing(books: Books) -> None:
    books.price_by_volume(OUTPUTS)
    books.use("r1", TokenUsage(0, 0, 600, 0))
    october = books.close("2026-10")
    assert books.close("2026-10") == october
    assert books.close("2026-11") is None
    books.use("r2", TokenUsage(0, 0, 1, 0), DECEMBER[0])
    assert volume_lines(books.close("2026-12")) == []


def test_a_prepaid_account_gets_its_discount_in_the_wallet_and_pays_more_from_grants_first(books: Books) -> None:
    books.price_by_volume(volume_price((0, 1_999_999_999), (100, 1_000_000_000)))
    books.price_by_volume(volume_price((0, 3_000_000_000), token_class=TokenClass.REASONING))
    books.wallets.set_mode(ACCOUNT, AccountMode.PREPAID)
    books.wallets.top_up(ACCOUNT, 10**9, idempotency_key="t")
    charged = books.use("r1", TokenUsage(0, 0, 200, 0))
    discounted = books.close("2026-10")
    assert discounted is not None
    assert (discounted.due_cents, discounted.paid_nano) == (0, discounted.total_nano)
    assert books.wallets.show(ACCOUNT).wallet_nano == 10**9 - discounted.total_nano
    assert discounted.total_nano < charged

    books.clock.now_ns = NOVEMBER[0]
    books.use("r2", TokenUsage(0, 0, 100, 100), NOVEMBER[0])
    books.wallets.grant(ACCOUNT, 60, idempotency_key="g")
    before = books.wallets.show(ACCOUNT)
    (line,) = volume_lines(books.close("2026-11"))
    assert line.amount_nano == nano(100 * (3_000_000_000 - 1_999_999_999))
    after = books.wallets.show(ACCOUNT)
    assert (after.grants[0].left_nano, after.wallet_nano) == (0, before.wallet_nano - line.amount_nano + 60)


def test_tokens_that_are_not_priced_apart_count_as_their_whole(books: Books) -> None:
    books.price_by_volume(volume_price((0, 1), token_class=TokenClass.OUTPUT))
    books.price_by_volume(volume_price((0, 1), token_class=TokenClass.INPUT))
    books.use("r1", TokenUsage(50, 20, 70, 30))
    found = {
        line.volume.token_class: line.volume.tokens for line in volume_lines(books.close("2026-10")) if line.volume
    }
    assert found == {"input": 30, "output": 70}  # cached tokens have a price of their own, reasoning ones have not


def test_a_contracts_own_price_is_adjusted_by_its_own_bands_alone(books: Books) -> None:
    own = Place(account_book(ACCOUNT), MODEL, Tier.STANDARD.value, 0)
    with books.database.write() as connection:
        contract = set_price(connection, price(book=own.book, output_nano_per_m=1_000_000_000))
    books.price_by_volume(OUTPUTS, volume_price((0, 500_000_000), place=own))
    usage = TokenUsage(0, 0, 600, 0)
    charge = rate(usage, contract)
    books.use(
        "own", usage, price_version=contract.version, cost_nano=charge.cost_nano, neurons_micro=charge.neurons_micro
    )
    (line,) = volume_lines(books.close("2026-10"))
    assert line.amount_nano == nano(600 * -500_000_000)


def test_another_accounts_volume_is_its_own(books: Books) -> None:
    books.price_by_volume(OUTPUTS)
    books.use("r1", TokenUsage(0, 0, 240, 0))
    books.use("r2", TokenUsage(0, 0, 240, 0), account_id=OTHER_ACCOUNT)
    books.use("free", TokenUsage(0, 0, 240, 0), charged=False, cost_nano=0, neurons_micro=0)
    assert volume_lines(books.close("2026-10")) == []


def test_an_adjustment_that_was_changed_is_found(books: Books) -> None:
    books.price_by_volume(OUTPUTS)
    books.use("r1", TokenUsage(0, 0, 600, 0))
    books.close("2026-10")
    more = volume_adjustments.c.amount_nano + 1
    with books.database.write() as connection:
        connection.execute(volume_adjustments.update().values(amount_nano=more))
    found = violations(books.database)
    assert any("is not the sum of its adjustments" in text for text in found)
    assert any("for the volume of output tokens" in text for text in found)
    with books.database.write() as connection:
        connection.execute(volume_adjustments.update().values(volume_version=99))
    assert any("under which it used nothing" in text for text in violations(books.database))


def test_focus_rows_of_a_month_come_to_all_that_was_booked_for_it(books: Books) -> None:
    books.price_by_volume(OUTPUTS)
    books.use("r1", TokenUsage(7, 2, 600, 0))
    books.use("r2", TokenUsage(7, 2, 5, 0))
    first = books.close("2026-10")
    books.use("late", TokenUsage(7, 2, 9, 0))
    books.wallets.reverse(ACCOUNT, "usage:r2")
    second = books.close("2026-11")
    assert first is not None
    assert second is not None
    rows = list(focus_rows(books.database, ACCOUNT, *OCTOBER, account_name="acme", issuer=FocusIssuer("Seller")))
    by_invoice = {
        invoice.name: sum(Decimal(row["BilledCost"] or "") for row in rows if row["InvoiceId"] == invoice.name)
        for invoice in (first, second)
    }
    assert by_invoice == {invoice.name: Decimal(invoice.total_nano).scaleb(-9) for invoice in (first, second)}
    corrections = [row for row in rows if row["ChargeClass"] == "Correction"]
    assert {row["BillingPeriodStart"] for row in corrections} == {"2026-11-01T00:00:00Z"}
    described = {row["ChargeDescription"] for row in corrections if row["ChargeCategory"] == "Adjustment"}
    assert described >= {f"volume price of output tokens of {MODEL}", f"refund of requests to {MODEL}"}
    november = focus_rows(books.database, ACCOUNT, *NOVEMBER, account_name="acme", issuer=FocusIssuer("Seller"))
    assert list(november) == []
