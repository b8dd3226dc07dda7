"""What a request must cost, from the price row and the token columns of its record, in integers."""

from typing import Any

from tests.e2e.service import Service


def expected_cost_nano(service: Service, row: dict[str, Any]) -> int:
    """The cost of the row's own tokens at the row's price version, rounded once, half up."""
    price = service.services.price_book.by_version(row["price_version"])
    cached_rate = price.input_nano_per_m if price.cached_input_nano_per_m is None else price.cached_input_nano_per_m
    numerator = (
        (row["prompt_tokens"] - row["cached_tokens"]) * price.input_nano_per_m
        + row["cached_tokens"] * cached_rate
        + row["completion_tokens"] * price.output_nano_per_m
    )
    return int((2 * numerator + 1_000_000) // 2_000_000)


def expected_neurons_micro(service: Service, row: dict[str, Any]) -> int:
    """Millionths of a neuron: tokens times neurons per million, with nothing to round."""
    price = service.services.price_book.by_version(row["price_version"])
    cached_rate = (
        price.input_neurons_per_m if price.cached_input_neurons_per_m is None else price.cached_input_neurons_per_m
    )
    return int(
        (row["prompt_tokens"] - row["cached_tokens"]) * price.input_neurons_per_m
        + row["cached_tokens"] * cached_rate
        + row["completion_tokens"] * price.output_neurons_per_m,
    )
