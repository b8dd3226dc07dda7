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
    """Each token is priced once: cached ones are a part of the prompt, reasoning ones a part of the completion.

    What the request itself costs is due once any of its tokens is: nothing shows that an engine worked on it before.
    """
    worked_on = usage.prompt > 0 or usage.completion > 0
    fresh = usage.prompt - usage.cached
    answer = usage.completion - usage.reasoning
    numerator = (
        fresh * price.input_nano_per_m
        + usage.cached * price.cached_nano
        + answer * price.output_nano_per_m
        + usage.reasoning * price.reasoning_nano
    )
    if worked_on:
        numerator += price.request_nano * TOKENS_PER_PRICE
    return Charge(round_half_up(numerator, TOKENS_PER_PRICE), neurons_micro(usage, price))


def neurons_micro(usage: TokenUsage, price: Price) -> int:
    """What it comes to in millionths of neurons, by the same rules; exact."""
    micro = (
        (usage.prompt - usage.cached) * price.input_neurons_per_m
        + usage.cached * price.cached_neurons
        + usage.completion * price.output_neurons_per_m
    )
    return micro + price.request_neurons_micro if usage.prompt > 0 or usage.completion > 0 else micro


def hold_nano(prompt_tokens: int, output_tokens: int, price: Price) -> int:
    """What a request of so many tokens costs at most: the prompt at its dearest class, the outputs at theirs.

    Rounded up, so that a hold and its extensions together are never below the charge.
    """
    prompt = prompt_tokens * _prompt_nano(price)
    return price.request_nano + round_up(prompt + output_tokens * _output_nano(price), TOKENS_PER_PRICE)


def outputs_within(nano: int, prompt_tokens: int, price: Price) -> int | None:
    """The most outputs for which hold_nano is not above `nano`; below 0 if not even the prompt is, None: any number."""
    left = (nano - price.request_nano) * TOKENS_PER_PRICE - prompt_tokens * _prompt_nano(price)
    if left < 0:
        return -1
    return left // _output_nano(price) if _output_nano(price) else None


def extension_nano(output_tokens: int, price: Price) -> int:
    """What so many outputs more cost at most, rounded up."""
    return round_up(output_tokens * _output_nano(price), TOKENS_PER_PRICE)


def _prompt_nano(price: Price) -> int:
    return max(price.input_nano_per_m, price.cached_nano)


def _output_nano(price: Price) -> int:
    return max(price.output_nano_per_m, price.reasoning_nano)
