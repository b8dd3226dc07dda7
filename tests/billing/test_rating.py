"""Rating against exact fractions, and holds against what is charged."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.money import round_half_up, usd_decimal
from billing.price_book import Price
from billing.rating import extension_nano, hold_nano, outputs_within, rate
from billing.usage import TokenUsage
from tests.billing.builders import price

amounts = st.integers(0, 10**13)
tokens = st.integers(0, 2_000_000)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    return price(
        input_nano_per_m=draw(amounts),
        cached_input_nano_per_m=draw(st.none() | amounts),
        output_nano_per_m=draw(amounts),
        reasoning_nano_per_m=draw(st.none() | amounts),
        input_neurons_per_m=draw(amounts),
        cached_input_neurons_per_m=draw(st.none() | amounts),
        output_neurons_per_m=draw(amounts),
        request_nano=draw(amounts),
        request_neurons_micro=draw(amounts),
    )


@st.composite
def usages(draw: st.DrawFn) -> TokenUsage:
    prompt, completion = draw(tokens), draw(tokens)
    return TokenUsage(prompt, draw(st.integers(0, prompt)), completion, draw(st.integers(0, completion)))


def _either(first: int | None, otherwise: int) -> int:
    return otherwise if first is None else first


@given(usages(), prices())
def test_the_cost_is_the_exact_sum_rounded_once(usage: TokenUsage, in_force: Price) -> None:
    per_token = [
        (usage.prompt - usage.cached, in_force.input_nano_per_m),
        (usage.cached, _either(in_force.cached_input_nano_per_m, in_force.input_nano_per_m)),
        (usage.completion - usage.reasoning, in_force.output_nano_per_m),
        (usage.reasoning, _either(in_force.reasoning_nano_per_m, in_force.output_nano_per_m)),
    ]
    exact = sum((count * Fraction(nano, 10**6) for count, nano in per_token), Fraction(0))
    if usage.prompt or usage.completion:
        exact += in_force.request_nano
    assert rate(usage, in_force).cost_nano == round_half_up(exact.numerator, exact.denominator)


@given(usages(), prices())
def test_neurons_are_exact_without_any_rounding(usage: TokenUsage, in_force: Price) -> None:
    cached = _either(in_force.cached_input_neurons_per_m, in_force.input_neurons_per_m)
    exact = (
        (usage.prompt - usage.cached) * in_force.input_neurons_per_m
        + usage.cached * cached
        + usage.completion * in_force.output_neurons_per_m
        + (in_force.request_neurons_micro if usage.prompt or usage.completion else 0)
    )
    assert rate(usage, in_force).neurons_micro == exact


@given(usages(), prices(), st.lists(st.integers(1, 5_000), max_size=20))
def test_a_hold_with_its_extensions_is_never_below_the_charge(
    usage: TokenUsage, in_force: Price, steps: list[int]
) -> None:
    held, covered = hold_nano(usage.prompt, 1024, in_force), 1024
    for step in steps:
        held += extension_nano(step, in_force)
        covered += step
    if covered < usage.completion:
        held += extension_nano(usage.completion - covered, in_force)
    assert held >= rate(usage, in_force).cost_nano


@given(usages(), usages(), prices())
def test_more_of_a_class_never_costs_less(usage: TokenUsage, more: TokenUsage, in_force: Price) -> None:
    both = TokenUsage(
        usage.prompt + more.prompt,
        usage.cached + more.cached,
        usage.completion + more.completion,
        usage.reasoning + more.reasoning,
    )
    assert rate(both, in_force).cost_nano >= rate(usage, in_force).cost_nano


@given(prompt=st.integers(0, 10**6), outputs=st.integers(0, 10**6), spare=st.integers(-1, 1), in_force=prices())
def test_the_most_outputs_within_an_amount_are_held_by_it_and_one_more_is_not(
    prompt: int, outputs: int, spare: int, in_force: Price
) -> None:
    nano = hold_nano(prompt, outputs, in_force) + spare
    most = outputs_within(nano, prompt, in_force)
    if most is None:
        assert hold_nano(prompt, 10**12, in_force) <= nano
        return
    assert most < 0 or hold_nano(prompt, most, in_force) <= nano
    assert hold_nano(prompt, max(most + 1, 0), in_force) > nano


def test_a_request_costs_its_price_once_and_nothing_if_no_engine_worked_on_it() -> None:
    by_the_request = price(request_nano=5_000, request_neurons_micro=7)
    assert rate(TokenUsage(10, 0, 100, 0), by_the_request).cost_nano == 1_010_000 + 5_000
    assert rate(TokenUsage(), by_the_request).cost_nano == rate(TokenUsage(), by_the_request).neurons_micro == 0


def test_cached_tokens_are_charged_once_and_at_their_own_rate() -> None:
    assert rate(TokenUsage(1_000, 900, 10, 0), price()).cost_nano == 290_000


def test_without_a_cached_price_cached_tokens_cost_what_input_costs() -> None:
    assert rate(TokenUsage(1_000, 900, 0, 0), price(cached_input_nano_per_m=None)).cost_nano == 1_000_000


def test_reasoning_tokens_cost_what_output_costs_unless_priced_apart() -> None:
    usage = TokenUsage(0, 0, 10, 4)
    assert rate(usage, price()).cost_nano == 100_000
    assert rate(usage, price(reasoning_nano_per_m=0)).cost_nano == 60_000


def test_ten_million_requests_of_one_nano_dollar_are_exactly_a_cent() -> None:
    one = rate(TokenUsage(1, 0, 0, 0), price(input_nano_per_m=1_000_000)).cost_nano
    assert usd_decimal(sum(one for _ in range(10**7))) == "0.01"


def test_zero_is_a_price() -> None:
    free = price(
        input_nano_per_m=0,
        cached_input_nano_per_m=0,
        output_nano_per_m=0,
        input_neurons_per_m=0,
        cached_input_neurons_per_m=0,
        output_neurons_per_m=0,
    )
    charge = rate(TokenUsage(10, 5, 10, 5), free)
    assert (charge.cost_nano, charge.neurons_micro) == (0, 0)


def test_a_published_bill_comes_out_to_the_digit() -> None:
    in_force = price(input_neurons_per_m=86_364, cached_input_neurons_per_m=14_545, output_neurons_per_m=363_636)
    charge = rate(TokenUsage(3_516 + 2_861, 2_861, 349, 0), in_force)
    assert round_half_up(charge.neurons_micro, 10_000) == 47_218  # 472.18 neurons


@pytest.mark.parametrize(("cached_nano", "dearest"), [(None, 1_000), (100_000_000, 1_000), (5_000_000_000, 5_000)])
def test_a_hold_takes_the_prompt_at_its_dearest_class(cached_nano: int | None, dearest: int) -> None:
    held = hold_nano(10, 100, price(cached_input_nano_per_m=cached_nano, reasoning_nano_per_m=20_000_000_000))
    assert held == 10 * dearest + 100 * 20_000
