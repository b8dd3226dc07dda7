"""An invoice as plain values: its lines and sums. Pure; close.py makes it, store.py keeps it, the renderers show it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from billing.money import NANO_PER_USD, round_half_up
from billing.price_book import Tier

NANO_PER_CENT: Final = NANO_PER_USD // 100


class LineKind(StrEnum):
    USAGE = "usage"
    LATE_USAGE = "late_usage"  # began in a month that was closed when it was booked
    REFUND = "refund"
    VOLUME = "volume"  # what a month's volume made tokens cost more or less than they were charged


@dataclass(frozen=True, slots=True)
class VolumeTerms:
    """What a line of the kind VOLUME rests on, as it was then. bands: (tokens from, nano-USD per million tokens).

    usage_month: whose volume; an earlier one than the invoice's where what was booked for it is corrected.
    """

    usage_month: str
    token_class: str
    tokens: int
    mode: str
    bands: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class InvoiceLine:
    """What one model was used for at one price; of a refund, what was taken back; what a volume adjusts.

    prompt_tokens includes cached_tokens, completion_tokens includes reasoning_tokens. The three prices are nano-USD per
    million tokens, request_nano is nano-USD a request; 0 of the others. amount_nano: the sum of what its requests cost,
    each rounded once.
    """

    kind: LineKind
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    input_nano_per_m: int
    cached_input_nano_per_m: int
    output_nano_per_m: int
    amount_nano: int
    tier: str = Tier.STANDARD
    request_nano: int = 0
    volume: VolumeTerms | None = None


@dataclass(frozen=True, slots=True)
class Invoice:
    """total_nano = Σ lines; total_nano − paid_nano + rounding_nano = due_cents in nano-USD.

    paid_nano: what grants and the wallet have paid already. A negative due is a credit note. month: "2026-11", UTC.
    """

    number: int
    account_id: str
    month: str
    issued_at_ns: int
    seller: str
    buyer: str
    lines: tuple[InvoiceLine, ...]
    total_nano: int
    paid_nano: int
    rounding_nano: int
    due_cents: int

    def __post_init__(self) -> None:
        assert sum(line.amount_nano for line in self.lines) == self.total_nano, "the lines add up to the total"
        due_nano = self.total_nano - self.paid_nano + self.rounding_nano
        assert due_nano == self.due_cents * NANO_PER_CENT, "what is due is in whole cents"

    @property
    def name(self) -> str:
        """The number as customers quote it."""
        return invoice_name(self.number)


def invoice_name(number: int) -> str:
    return f"{number:06d}"


def in_cents(nano: int) -> int:
    """The nearest whole number of cents, halves upwards."""
    return round_half_up(nano, NANO_PER_CENT)


def cents_text(cents: int) -> str:
    """Always with two decimals: "12.05", "-0.40"."""
    whole, part = divmod(abs(cents), 100)
    return f"{'-' if cents < 0 else ''}{whole}.{part:02d}"
