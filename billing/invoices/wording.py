"""What an invoice says, in words: the same for HTML and PDF. Pure. Amounts are plain decimals in USD, times UTC."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from billing.invoices.document import Invoice, InvoiceLine, LineKind, VolumeTerms, cents_text
from billing.ledger.periods import month_bounds
from billing.money import usd_decimal
from billing.price_book import Tier
from billing.rollups import DAY_NS

_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class LineText:
    """One line of the table. prices: empty for a refund; requests: empty for what a volume adjusts."""

    what: str
    requests: str
    tokens: str
    prices: str
    amount: str


def title(invoice: Invoice) -> str:
    return f"{'Credit note' if invoice.due_cents < 0 else 'Invoice'} {invoice.name}"


def period(invoice: Invoice) -> str:
    """Its first and last day: "2026-11-01 to 2026-11-30 (UTC)"."""
    start_ns, end_ns = month_bounds(invoice.month)
    return f"{_day(start_ns)} to {_day(end_ns - DAY_NS)} (UTC)"


def issued(invoice: Invoice) -> str:
    return _day(invoice.issued_at_ns)


def line_texts(invoice: Invoice) -> Iterator[LineText]:
    for line in invoice.lines:
        yield LineText(
            what=_what(line, invoice.month),
            requests=f"{line.requests:,}" if line.volume is None else "",
            tokens=_tokens(line),
            prices=_prices(line),
            amount=usd_decimal(line.amount_nano),
        )


def sums(invoice: Invoice) -> list[tuple[str, str]]:
    """What stands under the table, from the total to what is due. The total is exact; what is due is in cents."""
    rows = [("Total", usd_decimal(invoice.total_nano))]
    if invoice.paid_nano:
        rows.append(("Paid from credit", usd_decimal(-invoice.paid_nano)))
    if invoice.rounding_nano:
        rows.append(("Rounding to cents", usd_decimal(invoice.rounding_nano)))
    return [*rows, ("Amount due", cents_text(invoice.due_cents))]


def _what(line: InvoiceLine, month: str) -> str:
    if line.kind is LineKind.REFUND:
        return f"Refund: {line.model}"
    if line.volume is not None:
        corrects = "" if line.volume.usage_month == month else f", correction of {line.volume.usage_month}"
        return f"Volume price: {_served(line)}{corrects}"
    return f"{_served(line)} (from closed months)" if line.kind is LineKind.LATE_USAGE else _served(line)


def _served(line: InvoiceLine) -> str:
    return line.model if line.tier == Tier.STANDARD else f"{line.model}, {line.tier}"


def _tokens(line: InvoiceLine) -> str:
    if line.volume is not None:
        return f"{line.volume.tokens:,} {line.volume.token_class.replace('_', ' ')} in the month"
    cached = f" ({line.cached_tokens:,} cached)" if line.cached_tokens else ""
    return f"{line.prompt_tokens:,} in{cached}, {line.completion_tokens:,} out"


def _prices(line: InvoiceLine) -> str:
    if line.kind is LineKind.REFUND:
        return ""
    if line.volume is not None:
        return volume_text(line.volume)
    per_million = (line.input_nano_per_m, line.cached_input_nano_per_m, line.output_nano_per_m)
    tokens = " / ".join(usd_decimal(nano) for nano in per_million)
    return f"{tokens} + {usd_decimal(line.request_nano)} a request" if line.request_nano else tokens


def volume_text(terms: VolumeTerms) -> str:
    """The bands: "graduated: 0.27, from 1,000,000: 0.2"."""
    bands = (f"from {tokens_from:,}: {usd_decimal(nano)}" for tokens_from, nano in terms.bands[1:])
    return f"{terms.mode}: {', '.join((usd_decimal(terms.bands[0][1]), *bands))}"


def _day(at_ns: int) -> str:
    return (_EPOCH + timedelta(days=at_ns // DAY_NS)).strftime("%Y-%m-%d")
