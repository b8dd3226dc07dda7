"""Integers of money: nano-USD and micro-neurons, the one rounding, and their decimal texts. Pure; knows no price."""

import re

NANO_PER_USD = 1_000_000_000
MICRO_PER_NEURON = 1_000_000
TOKENS_PER_PRICE = 1_000_000  # prices are per million tokens

USD_TEXT = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?")


def round_half_up(numerator: int, denominator: int) -> int:
    """The integer nearest to the fraction, halves upwards: the only rounding that money sees."""
    assert denominator > 0, "a denominator is positive"
    return (2 * numerator + denominator) // (2 * denominator)


def round_up(numerator: int, denominator: int) -> int:
    """The least integer that is not below the fraction: for holds, which must cover what will be charged."""
    assert denominator > 0, "a denominator is positive"
    return -(-numerator // denominator)


def usd_decimal(nano: int) -> str:
    """Plain decimal USD: "0.00000125", "-3", "0". No exponent, no trailing zeros."""
    return _decimal(nano, NANO_PER_USD, 9)


def price_product_decimal(tokens: int, nano_per_m: int) -> str:
    """Plain decimal USD of tokens × price, exactly: up to 15 decimals."""
    return _decimal(tokens * nano_per_m, NANO_PER_USD * TOKENS_PER_PRICE, 15)


def neurons_decimal(micro: int) -> str:
    """Plain decimal neurons, as usd_decimal."""
    return _decimal(micro, MICRO_PER_NEURON, 6)


def parse_usd(text: str) -> int:
    """Nano-USD of a plain decimal text, exactly. Raises ValueError for signs, exponents and more than 9 decimals."""
    match = USD_TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an amount in USD: digits, and after a point at most 9 more.")
    whole, decimals = match.groups()
    return int(whole) * NANO_PER_USD + int((decimals or "").ljust(9, "0"))


def _decimal(amount: int, unit: int, digits: int) -> str:
    whole, part = divmod(abs(amount), unit)
    sign = "-" if amount < 0 else ""
    return f"{sign}{whole}.{part:0{digits}}".rstrip("0").rstrip(".") if part else f"{sign}{whole}"
