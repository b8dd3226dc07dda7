"""The one rounding and the decimal texts, against exact fractions."""

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.money import NANO_PER_USD, neurons_decimal, parse_usd, round_half_up, round_up, usd_decimal

numerators = st.integers(0, 10**30)
denominators = st.integers(1, 10**12)
amounts = st.integers(-(2**63), 2**63)


@given(numerators, denominators)
def test_rounding_is_to_the_nearest_and_halves_go_up(numerator: int, denominator: int) -> None:
    exact = Fraction(numerator, denominator)
    difference = round_half_up(numerator, denominator) - exact
    assert Fraction(-1, 2) < difference <= Fraction(1, 2)


@given(numerators, denominators)
def test_rounding_up_never_falls_below(numerator: int, denominator: int) -> None:
    assert 0 <= round_up(numerator, denominator) - Fraction(numerator, denominator) < 1


@pytest.mark.parametrize(("numerator", "rounded"), [(0, 0), (499_999, 0), (500_000, 1), (1_499_999, 1), (1_500_000, 2)])
def test_half_a_nano_dollar_goes_up(numerator: int, rounded: int) -> None:
    assert round_half_up(numerator, 1_000_000) == rounded


@given(amounts)
def test_the_decimal_text_is_exact_and_plain(nano: int) -> None:
    text = usd_decimal(nano)
    assert re.fullmatch(r"-?(0|[1-9]\d*)(\.\d*[1-9])?", text)
    assert Decimal(text) * NANO_PER_USD == nano


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (0, "0"),
        (1, "0.000000001"),
        (380, "0.00000038"),
        (NANO_PER_USD, "1"),
        (-1_500_000_000, "-1.5"),
        (10 * NANO_PER_USD, "10"),
    ],
)
def test_dollars_read_as_people_write_them(nano: int, text: str) -> None:
    assert usd_decimal(nano) == text


@pytest.mark.parametrize(("micro", "text"), [(0, "0"), (34_542, "0.034542"), (472_180_000, "472.18"), (1_000_000, "1")])
def test_neurons_read_as_people_write_them(micro: int, text: str) -> None:
    assert neurons_decimal(micro) == text


@given(st.integers(0, 10**18 - 1))
def test_a_parsed_amount_is_the_one_that_was_printed(nano: int) -> None:
    assert parse_usd(usd_decimal(nano)) == nano


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "1.",
        ".5",
        "-1",
        "+1",
        "1e3",
        "1,5",
        "0.0000000001",
        "nan",
        "inf",
        "0x1",
        "1 2",
        "١",
        "1_000",
        "1234567890",
    ],
)
def test_other_texts_are_no_amounts(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount"):
        parse_usd(text)
