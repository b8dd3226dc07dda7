"""Prices are written exactly: no float, no exponent."""

from decimal import Decimal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.price_texts import per_million, per_token, pricing
from tests.fakes import PRICE


@pytest.mark.parametrize(
    ("nano", "text"),
    [(950_000_000, "0.00000095"), (0, "0"), (1, "0.000000000000001"), (10**15, "1"), (1_500_000_000_000_000, "1.5")],
)
def test_per_token(nano: int, text: str) -> None:
    assert per_token(nano) == text


@given(st.integers(0, 10**18))
def test_per_token_is_exact(nano: int) -> None:
    assert Decimal(per_token(nano)) == Decimal(nano).scaleb(-15)
    assert "e" not in per_token(nano).lower()


@given(st.integers(0, 10**18))
def test_per_million_is_an_exact_json_number(nano: int) -> None:
    assert Decimal(orjson.dumps(per_million(nano)).decode()) == Decimal(nano).scaleb(-9)


def test_a_model_without_a_cached_price_names_none() -> None:
    assert set(pricing(PRICE)) == {"prompt", "completion", "input_cache_read"}
    bare = type(PRICE)(**{**{n: getattr(PRICE, n) for n in PRICE.__slots__}, "cached_input_nano_per_m": None})
    assert set(pricing(bare)) == {"prompt", "completion"}
