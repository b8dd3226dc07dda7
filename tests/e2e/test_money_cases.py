"""Money over real sockets where requests differ in price: by length, book, class, zero, absence; and the time zone."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from billing.budgets import BudgetPeriod
from billing.ledger.payers import AccountMode, HoldMode
from billing.price_book import Price, Tier, account_book, set_price
from billing.rating import hold_nano, rate
from billing.tables import prices
from billing.usage import TokenUsage
from tests.doubles.waiting import eventually
from tests.e2e.dialects import CHAT, DIALECTS, Dialect, dialect_name
from tests.e2e.service import Answer, Service


async def ask(service: Service, dialect: Dialect = CHAT, **fields: Any) -> Answer:
    return await service.post(dialect.path(service), dialect.body(service, **fields))


async def add_prices(service: Service, *rows: Price) -> None:
    with service.services.database.write() as connection:
        for row in rows:
            set_price(connection, replace(row, effective_from_ns=1, effective_to_ns=None))
    await service.services.price_book.refresh()


def listed(service: Service) -> Price:
    return service.services.price_book.price_in_force(service.model, time.time_ns())


async def budget(service: Service, limit_nano: int) -> None:
    service.services.budgets.add(service.account_id, limit_nano, BudgetPeriod.TOTAL)
    await service.services.holds.credit.refresh()


async def test_a_long_prompt_is_held_at_the_price_of_its_length(service: Service) -> None:
    base = listed(service)
    dear = replace(base, prompt_tokens_from=200, input_nano_per_m=50 * base.input_nano_per_m)
    await add_prices(service, dear)
    words = " ".join(["word"] * 400)
    long = [{"role": "user", "content": words}]
    # Room for it at the price of short prompts, and not at its own.
    await budget(service, hold_nano(2_000, 8, base))
    assert hold_nano(200, 8, dear) > hold_nano(2_000, 8, base)
    refused = await ask(service, messages=long)
    assert (refused.status, refused.json()["error"]["code"]) == (429, "budget_exceeded")
    assert (await ask(service)).status == 200
    assert service.services.price_book.by_version((await service.records())[0]["price_version"]).prompt_tokens_from == 0
    await service.oracle(rows=2)


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
@pytest.mark.parametrize("tier", [None, "priority"])
async def test_a_contract_without_a_cached_price_charges_cached_tokens_as_input(
    service: Service, dialect: Dialect, tier: str | None
) -> None:
    own = replace(listed(service), book=account_book(service.account_id), cached_input_nano_per_m=None)
    own = replace(own, tier=Tier(tier or "standard").value, input_nano_per_m=777_777_777)
    await add_prices(service, own)
    service.engine.steer(usage={"cached_tokens": 3})
    answer = await ask(service, dialect, service_tier=tier)
    row = await service.record(answer.headers["x-request-id"])
    price = service.services.price_book.by_version(row["price_version"])
    assert (price.book, price.cached_input_nano_per_m, row["cached_tokens"]) == (own.book, None, 3)
    assert row["cost_nano"] == rate(TokenUsage(row["prompt_tokens"], 3, row["completion_tokens"]), price).cost_nano
    assert row["cost_nano"] == rate(TokenUsage(row["prompt_tokens"], 0, row["completion_tokens"]), price).cost_nano


async def test_a_request_without_a_limit_does_not_hold_the_whole_budget(service: Service) -> None:
    """It holds its next 1,024 outputs; so does one that asks for more than any model makes."""
    held = hold_nano(100, 1_024, listed(service))
    await budget(service, 2 * held)
    service.engine.steer(itl_ms=20)
    slow = asyncio.create_task(ask(service, max_tokens=None), name="slow")
    await eventually(lambda: bool(service.engine.live), what="a running request")
    assert 0 < service.services.holds.credit.held_nano() <= held
    assert (await ask(service)).status == 200
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    service.engine.steer(tokens=1)
    assert (await ask(service, max_tokens=999_999_999)).status == 200
    await service.oracle(rows=3)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_account_that_clamps_gets_the_outputs_that_its_wallet_pays_and_is_told_so(
    service: Service, *, stream: bool
) -> None:
    wallets, price = service.services.wallets, listed(service)
    first = await ask(service)
    prompt = (await service.record(first.headers["x-request-id"]))["prompt_tokens"]  # posted, and so not the wallet's
    wallets.set_mode(service.account_id, AccountMode.PREPAID)
    wallets.set_hold_mode(service.account_id, HoldMode.CLAMP)
    wallets.top_up(service.account_id, hold_nano(prompt, 19, price), idempotency_key="t")
    await service.services.holds.credit.refresh()
    service.engine.steer(tokens=2_000)
    answer = await ask(service, max_tokens=2_000, stream=stream)
    assert (answer.status, answer.headers["x-pagegate-max-tokens"]) == (200, "19")
    assert answer.headers["x-pagegate-limit-reason"] == "credits"
    row = await service.record(answer.headers["x-request-id"])
    assert (row["completion_tokens"], row["finish_reason"], row["outcome"]) == (19, "length", "finished")
    assert wallets.show(service.account_id).wallet_nano == 0
    assert (await ask(service, max_tokens=2_000)).status == 402
    await service.oracle(rows=3)


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
async def test_zero_is_a_price_and_absence_is_none(service: Service, dialect: Dialect) -> None:
    service.services.wallets.set_mode(service.account_id, AccountMode.PREPAID)  # and nothing in it
    base = listed(service)
    await service.services.holds.credit.refresh()
    assert (await ask(service, dialect)).status == 402
    free = replace(base, input_nano_per_m=0, cached_input_nano_per_m=0, output_nano_per_m=0)
    with service.services.database.write() as connection:
        connection.execute(sa.delete(prices))
    await add_prices(service, free)
    answer = await ask(service, dialect)
    assert answer.status == 200
    assert dialect.usage_of(answer.json())["cost"] == "0"
    with service.services.database.write() as connection:
        connection.execute(sa.delete(prices))
    await service.services.price_book.refresh()
    assert (await ask(service, dialect)).status == 503


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    yield
    monkeypatch.delenv("TZ")
    time.tzset()


@pytest.mark.usefixtures("tokyo")
def test_a_month_ends_at_midnight_utc_wherever_the_server_stands() -> None:
    midnight_ns = 1_785_542_400 * 10**9  # 2026-08-01T00:00:00Z
    july = BudgetPeriod.MONTH.around(midnight_ns - 1)
    assert BudgetPeriod.MONTH.around(midnight_ns - 9 * 3_600 * 10**9 + 10**9) == july  # August in Tokyo
    assert BudgetPeriod.MONTH.around(midnight_ns)[0] == july[1] == midnight_ns
