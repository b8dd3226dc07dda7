"""An invoice as CSV (RFC 4180, UTF-8): a row for each line and one for each sum, amounts as plain decimals in USD."""

import csv
import io

from billing.invoices.document import Invoice, VolumeTerms, cents_text
from billing.invoices.wording import volume_text
from billing.money import usd_decimal

_COLUMNS = (
    *("invoice", "month", "account_id", "kind", "model", "requests", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "reasoning_tokens", "input_usd_per_m", "cached_input_usd_per_m", "output_usd_per_m"),
    *("amount_usd", "tier", "request_usd", "volume_month", "volume_class", "volume_tokens", "volume_terms"),
)


def render_csv(invoice: Invoice) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, restval="")
    writer.writeheader()
    head = {"invoice": invoice.name, "month": invoice.month, "account_id": invoice.account_id}
    for line in invoice.lines:
        writer.writerow(
            head
            | {
                "kind": line.kind.value,
                "model": line.model,
                "requests": line.requests,
                "prompt_tokens": line.prompt_tokens,
                "cached_tokens": line.cached_tokens,
                "completion_tokens": line.completion_tokens,
                "reasoning_tokens": line.reasoning_tokens,
                "input_usd_per_m": usd_decimal(line.input_nano_per_m),
                "cached_input_usd_per_m": usd_decimal(line.cached_input_nano_per_m),
                "output_usd_per_m": usd_decimal(line.output_nano_per_m),
                "amount_usd": usd_decimal(line.amount_nano),
                "tier": line.tier,
                "request_usd": usd_decimal(line.request_nano),
            }
            | _volume(line.volume)
        )
    sums = {
        "total": usd_decimal(invoice.total_nano),
        "paid_from_credit": usd_decimal(-invoice.paid_nano),
        "rounding": usd_decimal(invoice.rounding_nano),
        "due": cents_text(invoice.due_cents),
    }
    for kind, amount in sums.items():
        writer.writerow(head | {"kind": kind, "amount_usd": amount})
    return text.getvalue()


def _volume(terms: VolumeTerms | None) -> dict[str, object]:
    if terms is None:
        return {}
    return {
        "volume_month": terms.usage_month,
        "volume_class": terms.token_class,
        "volume_tokens": terms.tokens,
        "volume_terms": volume_text(terms),
    }
