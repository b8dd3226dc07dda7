"""Cost and usage as FOCUS 1.2 (the FinOps Open Cost and Usage Specification, https://focus.finops.org), one account.

A row is a UTC day × key × model × price × class, of tokens or of requests. A class costs its exact tokens × price,
which may have 15 decimals; a request is rounded to nano-USD once, so each such group has one more row, an adjustment,
that brings its sum to what the ledger booked. The command line writes rows as CSV or Parquet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
import sqlalchemy as sa

from billing.instants import instant_text
from billing.ledger.periods import month_bounds, month_of
from billing.money import TOKENS_PER_PRICE, price_product_decimal, usd_decimal
from billing.price_book import Price, read_prices
from billing.rollups import DAY_NS
from billing.tables import usage_events
from tenancy.database import Database

_GROUPS_AT_ONCE = 5_000
_SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "cost_nano")

# Which columns are numbers with how many decimals; the others are text. In the order of the specification.
DECIMALS: Final = {
    "BilledCost": 15,
    "ConsumedQuantity": 0,
    "ContractedCost": 15,
    "ContractedUnitPrice": 9,
    "EffectiveCost": 15,
    "ListCost": 15,
    "ListUnitPrice": 9,
    "PricingQuantity": 6,
}
COLUMNS: Final = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription"),
    *("ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost"),
    *("ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory"),
    *("PricingCurrency", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ResourceId"),
    *("ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter"),
    *("SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags"),
)


@dataclass(frozen=True, slots=True)
class FocusIssuer:
    """Who bills. name: of the service's operator."""

    name: str


def focus_rows(
    database: Database, account_id: str, from_ns: int, to_ns: int, *, account_name: str, issuer: FocusIssuer
) -> Iterator[dict[str, str | None]]:
    """Rows of COLUMNS for what began in [from_ns, to_ns) and was charged, by day; numbers as plain decimals."""
    with database.read() as connection:
        by_version = {price.version: price for price in read_prices(connection)}
        for group in connection.execute(_groups(account_id, from_ns, to_ns)).mappings():
            price = by_version[group["price_version"]]
            head = _head(group, price, account_id, account_name, issuer)
            left = group["cost_nano"] * TOKENS_PER_PRICE
            for token_class, tokens, nano_per_m in _classes(group, price):
                if tokens:
                    left -= tokens * nano_per_m
                    yield head | _usage(token_class, tokens, nano_per_m, price)
            if price.request_nano and group["requests"]:
                left -= group["requests"] * price.request_nano * TOKENS_PER_PRICE
                yield head | _requests(group["requests"], price)
            if left:
                yield head | _rounding(left)


def _groups(account_id: str, from_ns: int, to_ns: int) -> sa.Select[Any]:
    day = (usage_events.c.started_at_ns // DAY_NS).label("day")
    keys = (day, usage_events.c.key_id, usage_events.c.model, usage_events.c.price_version)
    worked_on = sa.or_(usage_events.c.prompt_tokens > 0, usage_events.c.completion_tokens > 0)
    requests = sa.cast(sa.func.sum(sa.case((worked_on, 1), else_=0)), sa.BigInteger).label("requests")
    return (
        sa.select(
            *keys,
            requests,
            *(sa.cast(sa.func.sum(usage_events.c[name]), sa.BigInteger).label(name) for name in _SUMMED),
        )
        .where(
            usage_events.c.account_id == account_id,
            usage_events.c.started_at_ns >= from_ns,
            usage_events.c.started_at_ns < to_ns,
            usage_events.c.charged,
            usage_events.c.price_version.is_not(None),
        )
        .group_by(*keys)
        .order_by(*keys)
        .execution_options(yield_per=_GROUPS_AT_ONCE)
    )


def _classes(group: sa.RowMapping, price: Price) -> tuple[tuple[str, int, int], ...]:
    """(class, tokens, nano-USD per million): each token is in one."""
    prompt, cached = group["prompt_tokens"], group["cached_tokens"]
    completion, reasoning = group["completion_tokens"], group["reasoning_tokens"]
    return (
        ("input", prompt - cached, price.input_nano_per_m),
        ("cached_input", cached, price.cached_nano),
        ("output", completion - reasoning, price.output_nano_per_m),
        ("reasoning", reasoning, price.reasoning_nano),
    )


def _head(
    group: sa.RowMapping, price: Price, account_id: str, account_name: str, issuer: FocusIssuer
) -> dict[str, str | None]:
    day_ns = group["day"] * DAY_NS
    month_start_ns, month_end_ns = month_bounds(month_of(day_ns))
    model = group["model"]
    return dict.fromkeys(COLUMNS) | {
        "BillingAccountId": account_id,
        "BillingAccountName": account_name,
        "BillingAccountType": "Account",
        "BillingCurrency": "USD",
        "BillingPeriodStart": instant_text(month_start_ns),
        "BillingPeriodEnd": instant_text(month_end_ns),
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": instant_text(day_ns),
        "ChargePeriodEnd": instant_text(day_ns + DAY_NS),
        "InvoiceIssuerName": issuer.name,
        "PricingCurrency": "USD",
        "ProviderName": issuer.name,
        "PublisherName": issuer.name,
        "ResourceId": model,
        "ResourceName": model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Inference",
        "ServiceSubcategory": "Generative AI",
        "SkuPriceId": str(price.version),
        "Tags": orjson.dumps({"pagegate/key_id": group["key_id"]}).decode(),
    }


def _usage(token_class: str, tokens: int, nano_per_m: int, price: Price) -> dict[str, str | None]:
    cost = price_product_decimal(tokens, nano_per_m)
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), usd_decimal(nano_per_m)),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{token_class.replace('_', ' ')} tokens of {price.model}",
        "ConsumedQuantity": str(tokens),
        "ConsumedUnit": "Tokens",
        "PricingCategory": "Standard",
        "PricingQuantity": price_product_decimal(tokens, 10**9),
        "PricingUnit": "1000000 Tokens",
        "SkuId": f"{price.model}:{token_class}:{price.tier}",
        "SkuMeter": f"{token_class} tokens",
    }


def _requests(count: int, price: Price) -> dict[str, str | None]:
    cost = usd_decimal(count * price.request_nano)
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        **dict.fromkeys(("ContractedUnitPrice", "ListUnitPrice"), usd_decimal(price.request_nano)),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"requests of {price.model}",
        "ConsumedQuantity": str(count),
        "ConsumedUnit": "Requests",
        "PricingCategory": "Standard",
        "PricingQuantity": str(count),
        "PricingUnit": "Requests",
        "SkuId": f"{price.model}:request:{price.tier}",
        "SkuMeter": "requests",
    }


def _rounding(numerator: int) -> dict[str, str | None]:
    cost = price_product_decimal(numerator, 1)
    return {
        **dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), cost),
        "ChargeCategory": "Adjustment",
        "ChargeDescription": "Each request is rounded to a billionth of a dollar once.",
        "SkuPriceId": None,
    }
