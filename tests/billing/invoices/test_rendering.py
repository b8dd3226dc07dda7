"""The same words and sums in HTML, PDF and CSV; names are escaped; the sums are decimal."""

import csv
import io
from dataclasses import replace

import pytest
from pypdf import PdfReader

from billing.invoices import wording
from billing.invoices.csv_lines import render_csv
from billing.invoices.document import Invoice, InvoiceLine, LineKind, cents_text, in_cents
from billing.invoices.html import render_html
from billing.invoices.pdf import render_pdf
from billing.ledger.periods import month_bounds
from tests.billing.builders import ACCOUNT

LINE = InvoiceLine(
    LineKind.USAGE, "@cf/a/model", 1_234, 30_000, 10_000, 4_000, 0, 350_000_000, 50_000_000, 10**9, 12_345
)
INVOICE = Invoice(
    number=7,
    account_id=ACCOUNT,
    month="2026-10",
    issued_at_ns=month_bounds("2026-11")[0],
    seller="Seller\nStreet 1",
    buyer="Zażółć Ελλάδα Ltd",
    lines=(LINE, replace(LINE, kind=LineKind.REFUND, requests=1, amount_nano=-345)),
    total_nano=12_000,
    paid_nano=2_000,
    rounding_nano=-10_000,
    due_cents=0,
)


@pytest.mark.parametrize(
    ("nano", "cents"), [(0, 0), (4_999_999, 0), (5_000_000, 1), (-5_000_000, 0), (-5_000_001, -1), (10**9, 100)]
)
def test_cents_are_the_nearest_halves_upwards(nano: int, cents: int) -> None:
    assert in_cents(nano) == cents


@pytest.mark.parametrize(("cents", "text"), [(0, "0.00"), (5, "0.05"), (-40, "-0.40"), (123_456, "1234.56")])
def test_cents_are_written_with_two_decimals(cents: int, text: str) -> None:
    assert cents_text(cents) == text


def test_the_page_tells_every_line_and_sum() -> None:
    page = render_html(INVOICE)
    for text in ("Invoice 000007", "2026-10-01 to 2026-10-31 (UTC)", "Issued", "2026-11-01", "Zażółć Ελλάδα Ltd"):
        assert text in page
    for text in ("1,234", "30,000 in (10,000 cached), 4,000 out", "0.35 / 0.05 / 1", "0.000012345"):
        assert text in page
    for text in ("0.000012", "-0.000002", "Rounding to cents", "-0.00001", "0.00", "Refund: @cf/a/model"):
        assert text in page


def test_names_on_the_page_are_text_and_never_markup() -> None:
    page = render_html(replace(INVOICE, buyer="<script>alert(1)</script>", seller="<b>"))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_less_than_nothing_due_is_a_credit_note() -> None:
    due = replace(INVOICE, rounding_nano=-10_000 - 10**7, due_cents=-1)
    assert wording.title(due) == "Credit note 000007"


def test_a_row_for_each_line_and_sum_in_the_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(render_csv(INVOICE))))
    assert [(row["kind"], row["amount_usd"]) for row in rows] == [
        ("usage", "0.000012345"),
        ("refund", "-0.000000345"),
        ("total", "0.000012"),
        ("paid_from_credit", "-0.000002"),
        ("rounding", "-0.00001"),
        ("due", "0.00"),
    ]
    assert {row["invoice"] for row in rows} == {"000007"}


def _pages(invoice: Invoice) -> list[str]:
    return [page.extract_text() for page in PdfReader(io.BytesIO(render_pdf(invoice))).pages]


def test_the_pdf_says_what_the_page_says() -> None:
    (text,) = _pages(INVOICE)
    for expected in ("Invoice 000007", "2026-10-01 to 2026-10-31 (UTC)", "Zażółć Ελλάδα Ltd", "0.35 / 0.05 / 1"):
        assert expected in text
    for name, amount in wording.sums(INVOICE):
        assert name in text
        assert amount in text


def test_the_pdf_of_an_invoice_is_always_the_same() -> None:
    assert render_pdf(INVOICE) == render_pdf(INVOICE)


def test_the_pdf_of_many_lines_tells_all_of_them_on_several_pages() -> None:
    lines = tuple(replace(LINE, model=f"model-{number}", amount_nano=0) for number in range(60))
    pages = _pages(replace(INVOICE, lines=lines, total_nano=0, paid_nano=0, rounding_nano=0))
    assert len(pages) > 1
    assert all(line.model in "".join(pages) for line in lines)
