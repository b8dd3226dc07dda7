"""One request's cost, line by line: tokens by class, the price of each, and what they come to, to the last digit. Pure.

The charge is rounded once, over the sum (rating.py); lines are exact, so a last line may tell what rounding did.
"""

from dataclasses import dataclass
from typing import Final

from billing.money import TOKENS_PER_PRICE
from billing.price_book import Price
from billing.store import UsageEvent

_PICO_PER_NANO_TOKEN: Final = TOKENS_PER_PRICE  # a token × nano-USD per million, in millionths of a nano-USD


@dataclass(frozen=True, slots=True)
class CostLine:
    """price_nano_per_m: None for what is not by the token: the request itself, the rounding.

    amount: in millionths of a nano-USD, exact.
    """

    name: str
    tokens: int | None
    price_nano_per_m: int | None
    amount: int


def cost_lines(event: UsageEvent, price: Price) -> list[CostLine]:
    """What an event that was charged came to; the lines add up to its cost exactly."""
    classes = (
        ("Input", event.prompt_tokens - event.cached_tokens, price.input_nano_per_m),
        ("Cached input", event.cached_tokens, price.cached_nano),
        ("Output", event.completion_tokens - event.reasoning_tokens, price.output_nano_per_m),
        ("Reasoning", event.reasoning_tokens, price.reasoning_nano),
    )
    lines = [
        CostLine(name, tokens, nano, tokens * nano) for name, tokens, nano in classes if tokens or name != "Reasoning"
    ]
    if price.request_nano and event.prompt_tokens + event.completion_tokens:
        lines.append(CostLine("Request", None, None, price.request_nano * _PICO_PER_NANO_TOKEN))
    left = event.cost_nano * _PICO_PER_NANO_TOKEN - sum(line.amount for line in lines)
    if not event.charged:
        lines.append(CostLine("Not charged", None, None, left))
    elif left:
        lines.append(CostLine("Rounding", None, None, left))
    return lines
