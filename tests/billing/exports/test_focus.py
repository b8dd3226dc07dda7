"""FOCUS rows add up to what the ledger booked, to the last digit, by day, key, model and class."""

from decimal import Decimal

import pytest

from billing.exports.focus import COLUMNS, FocusIssuer, focus_rows
from billing.ledger.periods import month_bounds
from billing.price_book import read_prices, set_price
from billing.rating import rate
from billing.rollups import DAY_NS
from billing.usage import TokenUsage
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, KEY, MODEL, price
from tests.billing.exports.every_kind import fill
from tests.billing.rows import event_row, post_rows
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

START, END = month_bounds("2026-10")
ISSUER = FocusIssuer("Seller")


@pytest.fixture
def used(database: Database) -> Database:
    """Three odd prices' worth of requests over two days and two keys, one of them free of charge."""
    odd = price(
        input_nano_per_m=333_333_331, cached_input_nano_per_m=77_777, output_nano_per_m=1_999_999_999, request_nano=77
    )
    with database.write() as connection:
        set_price(connection, odd)
        (row,) = read_prices(connection)
    events = []
    for number in range(20):
        usage = TokenUsage(prompt=11 + number, cached=number, completion=7 * number + 1, reasoning=number)
        charge = rate(usage, row)
        events.append(
            event_row(
                id=f"r{number}",
                key_id=KEY if number % 3 else "d" * 32,
                started_at_ns=START + (number % 2) * DAY_NS,
                prompt_tokens=usage.prompt,
                cached_tokens=usage.cached,
                completion_tokens=usage.completion,
                reasoning_tokens=usage.reasoning,
                cost_nano=charge.cost_nano,
                neurons_micro=charge.neurons_micro,
                price_version=row.version,
            )
        )
    events.append(event_row(id="failed", started_at_ns=START, charged=False, cost_nano=0, neurons_micro=0))
    events.append(event_row(id="later", started_at_ns=END, cost_nano=0, neurons_micro=0))
    post_rows(database, *events)
    return database


def _rows(database: Database) -> list[dict[str, str | None]]:
    return list(focus_rows(database, ACCOUNT, START, END, account_name="acme", issuer=ISSUER))


def test_the_sum_is_the_ledgers(used: Database) -> None:
    with used.read() as connection:
        booked = connection.exec_driver_sql("SELECT SUM(cost_nano) FROM usage_events").scalar()
    assert sum(Decimal(row["BilledCost"] or "0") for row in _rows(used)) == Decimal(int(booked or 0)).scaleb(-9)


def test_each_usage_row_is_its_quantity_times_its_price(used: Database) -> None:
    usage = [row for row in _rows(used) if row["ChargeCategory"] == "Usage"]
    assert {row["SkuMeter"] for row in usage} == {
        "input tokens",
        "cached_input tokens",
        "output tokens",
        "reasoning tokens",
        "requests",
    }
    for row in usage:
        quantity, unit_price = Decimal(row["PricingQuantity"] or ""), Decimal(row["ListUnitPrice"] or "")
        assert Decimal(row["BilledCost"] or "") == quantity * unit_price
        size = 1 if row["SkuMeter"] == "requests" else 1_000_000
        assert quantity * size == Decimal(row["ConsumedQuantity"] or "")


def test_rows_are_of_a_day_and_a_key_within_the_period(used: Database) -> None:
    rows = _rows(used)
    assert {row["ChargePeriodStart"] for row in rows} == {"2026-10-01T00:00:00Z", "2026-10-02T00:00:00Z"}
    assert {row["BillingPeriodEnd"] for row in rows} == {"2026-11-01T00:00:00Z"}
    assert len({row["Tags"] for row in rows}) == 2
    assert {(row["ResourceId"], row["BillingAccountName"], row["ProviderName"]) for row in rows} == {
        (MODEL, "acme", "Seller")
    }


def test_every_row_has_every_column(used: Database) -> None:
    assert all(tuple(row) == COLUMNS for row in _rows(used))


def test_rows_of_every_kind_say_what_the_specification_asks_of_them(database: Database) -> None:
    fill(database)
    rows = list(focus_rows(database, ACCOUNT, START, END, account_name="acme", issuer=ISSUER))
    kinds = {(row["ChargeCategory"], row["ChargeClass"], row["ChargeFrequency"]) for row in rows}
    assert kinds == {
        ("Usage", None, "Usage-Based"),
        ("Usage", "Correction", "Usage-Based"),
        ("Adjustment", None, "Usage-Based"),  # rounding
        ("Adjustment", None, "One-Time"),
        ("Adjustment", "Correction", "Usage-Based"),
        ("Adjustment", "Correction", "One-Time"),
    }
    never_null = ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost", "BillingCurrency", "InvoiceId")
    for row in rows:
        assert all(row[name] is not None for name in never_null)
        used = row["ChargeCategory"] == "Usage"
        for name in ("ConsumedQuantity", "ConsumedUnit", "PricingQuantity", "PricingUnit", "SkuId", "SkuPriceId"):
            assert (row[name] is not None) == used, name
    of_price: dict[str | None, set[str | None]] = {}
    for row in rows:
        of_price.setdefault(row["SkuPriceId"], set()).add(row["SkuId"])
    assert all(len(skus) == 1 for skus in of_price.values())
