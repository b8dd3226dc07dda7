"""Cost and usage as FOCUS 1.2 (the FinOps Open Cost and Usage Specification, https://focus.finops.org), one account.

A row is a UTC day × key × model × price × class, of tokens or of requests. A class costs its exact tokens × price,
which may have 15 decimals; a request is rounded to nano-USD once, so each such group has one more row, an adjustment,
that brings its sum to what the ledger booked. Refunds and what a month's volume adjusted are rows too. A row's billing
period is the month that it was booked in: of late usage, refunds and later adjustments another than that of its charge.
The command line writes rows as CSV or Parquet; `python -m benchmarks.focus_validation` has the FinOps Foundation's own
validator read them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
import sqlalchemy as sa

from billing.instants import instant_text
from billing.invoices.document import invoice_name
from billing.ledger.periods import month_bounds, month_of
from billing.ledger.transactions import usage_source
from billing.money import TOKENS_PER_PRICE, price_product_decimal, usd_decimal
from billing.price_book import Price, read_prices
from billing.rollups import DAY_NS
from billing.tables import invoices, ledger_transactions, usage_events, volume_adjustments
from billing.volume_prices import read_volume_prices
from tenancy.database import Database

_GROUPS_AT_ONCE = 5_000
_DAY = (usage_events.c.started_at_ns // DAY_NS).label("day")
_USAGE_SOURCE = sa.literal(usage_source("")) + usage_events.c.id
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
    "PricingCurrencyContractedUnitPrice": 9,
    "PricingCurrencyEffectiveCost": 15,
    "PricingCurrencyListUnitPrice": 9,
    "PricingQuantity": 6,
}
COLUMNS: Final = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription"),
    *("ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "CommitmentDiscountStatus", "ConsumedQuantity"),
    *("ConsumedUnit", "ContractedCost", "ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName"),
    *("ListCost", "ListUnitPrice", "PricingCategory", "PricingCurrency", "PricingCurrencyContractedUnitPrice"),
    *("PricingCurrencyEffectiveCost", "PricingCurrencyListUnitPrice", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ResourceId", "ResourceName", "ResourceType", "ServiceCategory"),
    *("ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceDetails", "SkuPriceId", "SubAccountId"),
    *("SubAccountName", "SubAccountType", "Tags"),
)
# Prices and bills are in US dollars alike.
_COSTS: Final = ("BilledCost", "ContractedCost", "EffectiveCost", "ListCost", "PricingCurrencyEffectiveCost")
_UNIT_PRICES: Final = (
    *("ContractedUnitPrice", "ListUnitPrice"),
    *("PricingCurrencyContractedUnitPrice", "PricingCurrencyListUnitPrice"),
)

Row = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class FocusIssuer:
    """Who bills. name: of the service's operator."""

    name: str


@dataclass(frozen=True, slots=True)
class _Bill:
    """Whose rows they are; invoices: the names of those that were written, by month."""

    account_id: str
    account_name: str
    issuer: FocusIssuer
    invoices: Mapping[str, str]

    def head(self, charged_ns: tuple[int, int], booked_month: str) -> Row:
        """What every row says of itself: when it was charged, and when billed. All else is null."""
        from_ns, to_ns = charged_ns
        start_ns, end_ns = month_bounds(booked_month)
        return dict.fromkeys(COLUMNS) | {
            "BillingAccountId": self.account_id,
            "BillingAccountName": self.account_name,
            "BillingAccountType": "Account",
            "BillingCurrency": "USD",
            "BillingPeriodStart": instant_text(start_ns),
            "BillingPeriodEnd": instant_text(end_ns),
            "ChargeClass": None if month_of(from_ns) == booked_month else "Correction",
            "ChargeFrequency": "Usage-Based",
            "ChargePeriodStart": instant_text(from_ns),
            "ChargePeriodEnd": instant_text(to_ns),
            "InvoiceId": self.invoices.get(booked_month),
            "InvoiceIssuerName": self.issuer.name,
            "PricingCurrency": "USD",
            "ProviderName": self.issuer.name,
            "PublisherName": self.issuer.name,
            "ResourceType": "Model",
            "ServiceCategory": "AI and Machine Learning",
            "ServiceName": "Inference",
            "ServiceSubcategory": "Generative AI",
        }

    def day(self, group: sa.RowMapping) -> Row:
        """The head of a day's rows of one key and model."""
        start_ns = group["day"] * DAY_NS
        return self.head((start_ns, start_ns + DAY_NS), group["month"] or month_of(start_ns)) | {
            "ResourceId": group["model"],
            "ResourceName": group["model"],
            "Tags": orjson.dumps({"pagegate/key_id": group["key_id"]}).decode(),
        }


def focus_rows(
    database: Database, account_id: str, from_ns: int, to_ns: int, *, account_name: str, issuer: FocusIssuer
) -> Iterator[Row]:
    """Rows of COLUMNS for what began in [from_ns, to_ns) and was charged, by day, then for what adjusts it.

    Numbers are plain decimals. A month's volume is of the instant at which the month begins.
    """
    with database.read() as connection:
        by_version = {price.version: price for price in read_prices(connection)}
        numbers = sa.select(invoices.c.month, invoices.c.number).where(invoices.c.account_id == account_id)
        names = {month: invoice_name(number) for month, number in connection.execute(numbers)}
        bill = _Bill(account_id, account_name, issuer, names)
        for group in connection.execute(_groups(account_id, from_ns, to_ns)).mappings():
            price = by_version[group["price_version"]]
            yield from _charged(group, price, bill.day(group))
        for group in connection.execute(_refunds(account_id, from_ns, to_ns)).mappings():
            yield bill.day(group) | _adjustment(f"refund of requests to {group['model']}", -group["cost_nano"])
        schedules = {schedule.version: schedule for schedule in read_volume_prices(connection)}
        for row in connection.execute(_volumes(account_id)):
            bounds = month_bounds(row.usage_month)
            if from_ns <= bounds[0] < to_ns:
                schedule = schedules[row.volume_version]
                described = f"volume price of {_worded(schedule.token_class)} tokens of {schedule.place.model}"
                resource = dict.fromkeys(("ResourceId", "ResourceName"), schedule.place.model)
                yield bill.head(bounds, row.month) | resource | _adjustment(described, row.amount_nano)


def _charged(group: sa.RowMapping, price: Price, head: Row) -> Iterator[Row]:
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
    """Charged requests; month is null where they cost nothing, which nothing books."""
    worked_on = sa.or_(usage_events.c.prompt_tokens > 0, usage_events.c.completion_tokens > 0)
    requests = sa.cast(sa.func.sum(sa.case((worked_on, 1), else_=0)), sa.BigInteger).label("requests")
    keys = (
        _DAY,
        usage_events.c.key_id,
        usage_events.c.model,
        usage_events.c.price_version,
        ledger_transactions.c.month,
    )
    return (
        sa.select(
            *keys,
            requests,
            *(sa.cast(sa.func.sum(usage_events.c[name]), sa.BigInteger).label(name) for name in _SUMMED),
        )
        .outerjoin(ledger_transactions, ledger_transactions.c.source == _USAGE_SOURCE)
        .where(
            *_began(account_id, from_ns, to_ns),
            usage_events.c.charged,
            usage_events.c.price_version.is_not(None),
        )
        .group_by(*keys)
        .order_by(*keys)
        .execution_options(yield_per=_GROUPS_AT_ONCE)
    )


def _refunds(account_id: str, from_ns: int, to_ns: int) -> sa.Select[Any]:
    """Requests that were taken back, by the month in which that was booked."""
    keys = (_DAY, usage_events.c.key_id, usage_events.c.model, ledger_transactions.c.month)
    return (
        sa.select(*keys, sa.cast(sa.func.sum(usage_events.c.cost_nano), sa.BigInteger).label("cost_nano"))
        .join_from(usage_events, ledger_transactions, ledger_transactions.c.reverses == _USAGE_SOURCE)
        .where(*_began(account_id, from_ns, to_ns))
        .group_by(*keys)
        .order_by(*keys)
    )


def _volumes(account_id: str) -> sa.Select[Any]:
    keys = [volume_adjustments.c[name] for name in ("usage_month", "volume_version", "month")]
    of_account = volume_adjustments.c.account_id == account_id
    return sa.select(*keys, volume_adjustments.c.amount_nano).where(of_account).order_by(*keys)


def _began(account_id: str, from_ns: int, to_ns: int) -> tuple[sa.ColumnElement[bool], ...]:
    started = usage_events.c.started_at_ns
    return (usage_events.c.account_id == account_id, started >= from_ns, started < to_ns)


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


def _usage(token_class: str, tokens: int, nano_per_m: int, price: Price) -> Row:
    cost = price_product_decimal(tokens, nano_per_m)
    return {
        **dict.fromkeys(_COSTS, cost),
        **dict.fromkeys(_UNIT_PRICES, usd_decimal(nano_per_m)),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{_worded(token_class)} tokens of {price.model}",
        "ConsumedQuantity": str(tokens),
        "ConsumedUnit": "Tokens",
        "PricingCategory": "Standard",
        "PricingQuantity": price_product_decimal(tokens, 10**9),
        "PricingUnit": "1000000 Tokens",
        "SkuId": f"{price.model}:{token_class}:{price.tier}",
        "SkuMeter": f"{token_class} tokens",
        "SkuPriceId": f"{price.version}:{token_class}",
    }


def _requests(count: int, price: Price) -> Row:
    cost = usd_decimal(count * price.request_nano)
    return {
        **dict.fromkeys(_COSTS, cost),
        **dict.fromkeys(_UNIT_PRICES, usd_decimal(price.request_nano)),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"requests of {price.model}",
        "ConsumedQuantity": str(count),
        "ConsumedUnit": "Requests",
        "PricingCategory": "Standard",
        "PricingQuantity": str(count),
        "PricingUnit": "Requests",
        "SkuId": f"{price.model}:request:{price.tier}",
        "SkuMeter": "requests",
        "SkuPriceId": f"{price.version}:request",
    }


def _rounding(numerator: int) -> Row:
    cost = price_product_decimal(numerator, 1)
    return {
        **dict.fromkeys(_COSTS, cost),
        "ChargeCategory": "Adjustment",
        "ChargeDescription": "Each request is rounded to a billionth of a dollar once.",
    }


def _adjustment(described: str, amount_nano: int) -> Row:
    """After the charge: once, and of no unit's price."""
    return {
        **dict.fromkeys(_COSTS, usd_decimal(amount_nano)),
        "ChargeCategory": "Adjustment",
        "ChargeDescription": described,
        "ChargeFrequency": "One-Time",
    }


def _worded(token_class: str) -> str:
    return token_class.replace("_", " ")
