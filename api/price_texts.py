"""How a price row is written for clients: per token as a decimal text, per million tokens as an exact number."""

import orjson

from billing.money import usd_decimal
from billing.price_book import Price

_DECIMALS = 15  # nano-USD per million tokens are 10⁻¹⁵ USD per token


def per_token(nano_per_million: int) -> str:
    """USD per token, plain decimal: 950000000 nano-USD per million tokens is "0.00000095"."""
    whole, part = divmod(nano_per_million, 10**_DECIMALS)
    return f"{whole}.{part:0{_DECIMALS}}".rstrip("0").rstrip(".")


def per_million(nano_per_million: int) -> orjson.Fragment:
    """USD per million tokens as a JSON number with all its digits: no float comes between."""
    return orjson.Fragment(usd_decimal(nano_per_million))


def pricing(price: Price) -> dict[str, str]:
    """USD per token by class. A model without a cached price bills cached tokens as input, so it names none."""
    texts = {"prompt": per_token(price.input_nano_per_m), "completion": per_token(price.output_nano_per_m)}
    if price.cached_input_nano_per_m is not None:
        texts["input_cache_read"] = per_token(price.cached_input_nano_per_m)
    return texts
