"""Usage × price, in exact integers. Pure: metering charges by it, the gateway holds by it, invariants recompute it."""

from billing.money import TOKENS_PER_PRICE, round_half_up, round_up
from billing.price_book import Price
from billing.usage import TokenUsage
from tenancy.values import value


@value
class Charge:
    """cost_nano: nano-USD, rounded once. neurons_micro: exact, since neurons are priced per million tokens too."""

    cost_nano: int
    neurons_micro: int


NO_CHARGE = Charge(0, 0)


def rate(usage: TokenUsage, price: Price) -> Charge:
    """Each token is priced once: cached ones are a part of the prompt, reasoning ones a part of the completion."""
    fresh = usage.prompt - usage.cached
    answer = usage.completion - usage.reasoning
    numerator = (
        fresh * price.input_nano_per_m
        + usage.cached * price.cached_nano
        + answer * price.output_nano_per_m
        + usage.reasoning * price.reasoning_nano
    )
    neurons_micro = (
        fresh * price.input_neurons_per_m
        + usage.cached * price.cached_neurons
        + usage.completion * price.output_neurons_per_m
    )
    return Charge(round_half_up(numerator, TOKENS_PER_PRICE), neurons_micro)


def hold_nano(prompt_tokens: int, output_tokens: int, price: Price) -> int:
    """What so many tokens cost at most: the prompt at its dearest class, the outputs at theirs, rounded up.

    Rounded up, so that a hold and its extensions together are never below the charge.
    """
    numerator = prompt_tokens * max(price.input_nano_per_m, price.cached_nano) + output_tokens * max(
        price.output_nano_per_m,
        price.reasoning_nano,
    )
    return round_up(numerator, TOKENS_PER_PRICE)
