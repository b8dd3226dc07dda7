"""An invoice as PDF, A4, with the words of the HTML page. Open Sans covers Latin, Greek and Cyrillic scripts."""

from datetime import UTC, datetime, timedelta
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from fpdf import FPDF, XPos, YPos
from fpdf.fonts import FontFace

from billing.invoices import wording
from billing.invoices.document import Invoice

_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_FONT = "Open Sans"
_GREY = (91, 102, 117)
_MARGIN_MM = 18
_WIDTH_MM = 210 - 2 * _MARGIN_MM
_WIDTHS = (30, 11, 25, 22, 12)  # parts of the table's width
_HEADINGS = ("Model", "Requests", "Tokens", "USD per million:\ninput / cached / output", "USD")


def render_pdf(invoice: Invoice) -> bytes:
    """The same bytes for the same invoice."""
    pdf = FPDF(format="A4")
    pdf.set_creation_date(_EPOCH + timedelta(seconds=invoice.issued_at_ns // 1_000_000_000))
    pdf.set_title(wording.title(invoice))
    pdf.set_lang("en")
    for style, file in (("", "OpenSans-Regular.ttf"), ("B", "OpenSans-Bold.ttf")):
        pdf.add_font(_FONT, style, _font_file(file))
    pdf.set_margin(_MARGIN_MM)
    pdf.set_auto_page_break(auto=True, margin=_MARGIN_MM)
    pdf.add_page()
    _head(pdf, invoice)
    _table(pdf, invoice)
    return bytes(pdf.output())


def _head(pdf: FPDF, invoice: Invoice) -> None:
    top = pdf.get_y()
    pdf.set_font(_FONT, "B", 18)
    pdf.cell(0, 10, wording.title(invoice), new_x=XPos.LMARGIN, new_y=YPos.NEXT)
    pdf.set_font(_FONT, "", 9)
    for name, value in (
        ("Issued", wording.issued(invoice)),
        ("For", wording.period(invoice)),
        ("Account", invoice.account_id),
    ):
        pdf.set_text_color(*_GREY)
        pdf.cell(18, 5, name)
        pdf.set_text_color(0)
        pdf.cell(0, 5, value, new_x=XPos.LMARGIN, new_y=YPos.NEXT)
    below = pdf.get_y()
    pdf.set_xy(_MARGIN_MM + _WIDTH_MM // 2, top)
    pdf.multi_cell(_WIDTH_MM // 2, 5, invoice.seller, align="R", new_x=XPos.LMARGIN, new_y=YPos.NEXT)
    pdf.set_y(max(below, pdf.get_y()) + 8)
    pdf.multi_cell(0, 5, invoice.buyer, new_x=XPos.LMARGIN, new_y=YPos.NEXT)
    pdf.ln(8)


def _table(pdf: FPDF, invoice: Invoice) -> None:
    pdf.set_font(_FONT, "", 8)
    sides = ("LEFT", "RIGHT", "LEFT", "LEFT", "RIGHT")
    with pdf.table(
        col_widths=_WIDTHS,
        text_align=sides,
        borders_layout="HORIZONTAL_LINES",
        line_height=5,
        padding=1,
        headings_style=FontFace(emphasis="BOLD", color=_GREY),
    ) as table:
        table.row(_HEADINGS)
        for line in wording.line_texts(invoice):
            table.row((line.what, line.requests, line.tokens, line.prices, line.amount))
    pdf.ln(4)
    rows = wording.sums(invoice)
    for name, amount in rows:
        due = (name, amount) == rows[-1]
        pdf.set_font(_FONT, "B" if due else "", 10 if due else 9)
        pdf.cell(_WIDTH_MM - 40, 6, name, align="R")
        pdf.cell(40, 6, amount, align="R", new_x=XPos.LMARGIN, new_y=YPos.NEXT)


def _font_file(name: str) -> Path:
    files = distribution("ttf-opensans").files or []
    return next(Path(str(file.locate())) for file in files if file.name == name)
