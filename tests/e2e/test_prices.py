"""To the nano-dollar: answer, header, record and price row say the same, and no price means no service."""

import time
from dataclasses import replace
from decimal import Decimal
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from billing.price_book import Tier, account_book, set_price
from billing.rating import rate
from billing.tables import prices
from billing.usage import TokenUsage
from tenancy.provisioning import set_limits
from tests.doubles.waiting import eventually_async
from tests.e2e.dialects import CHAT, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.ledger import expected_cost_nano, expected_neurons_micro
from tests.e2e.service import Service

NANO = 10**9
MICRO = 10**6


def nano(decimal_usd: str) -> int:
    """A decimal string of dollars as nano-dollars, exactly; no exponent, no trailing zeros."""
    assert isinstance(decimal_usd, str)
    assert "e" not in decimal_usd.lower()
    assert "." not in decimal_usd or not decimal_usd.endswith("0")
    amount = Decimal(decimal_usd) * NANO
    assert amount == int(amount)
    return int(amount)


async def whole(service: Service, dialect: Dialect, **fields: Any) -> tuple[dict[str, Any], dict[str, str]]:
    answer = await service.post(dialect.path(service), dialect.body(service, **fields))
    assert answer.status == 200, answer.body
    return dialect.usage_of(answer.json()), answer.headers


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
class TestCost:
    async def test_is_the_same_in_answer_record_and_arithmetic(self, service: Service, dialect: Dialect) -> None:
        for cached, output in ((0, 1), (1, 2), (2, 37), (5, 100)):
            service.engine.steer(usage={"cached_tokens": cached})
            usage, headers = await whole(service, dialect, max_tokens=output)
            row = await service.record(headers["x-request-id"])
            assert usage["prompt_tokens_details"]["cached_tokens"] == row["cached_tokens"] == cached
            assert usage["completion_tokens"] == row["completion_tokens"] == output
            assert usage["prompt_tokens"] == row["prompt_tokens"]
            assert usage["total_tokens"] == row["prompt_tokens"] + output
            assert nano(usage["cost"]) == nano(row["cost"]) == row["cost_nano"] == expected_cost_nano(service, row)
            assert Decimal(headers["cf-ai-neurons"]) * MICRO == expected_neurons_micro(service, row)
        await service.oracle(rows=4)

    async def test_of_a_stream_is_the_cost_of_a_whole_answer(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(usage={"cached_tokens": 2})
        usage, _ = await whole(service, dialect)
        body = dialect.body(service, stream=True, stream_options={"include_usage": True})
        events = (await service.post(dialect.path(service), body)).events()
        assert orjson.loads(events[-2])["usage"] == usage
        first, second = await service.records()
        assert first["cost_nano"] == second["cost_nano"] == nano(usage["cost"])

    async def test_more_cached_than_sent_is_clamped_and_never_negative(
        self, service: Service, dialect: Dialect
    ) -> None:
        service.engine.steer(usage={"cached_tokens": 100_000})
        usage, headers = await whole(service, dialect)
        row = await service.record(headers["x-request-id"])
        assert row["cached_tokens"] == row["prompt_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert row["cost_nano"] == expected_cost_nano(service, row) > 0

    async def test_counts_are_integers_and_neurons_are_not_among_them(self, service: Service, dialect: Dialect) -> None:
        usage, _ = await whole(service, dialect)
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert type(usage[name]) is int
        assert all(not isinstance(value, float) for value in usage.values())
        assert dialect is RUN or "neurons" not in usage


async def cheap_and_dear(service: Service) -> None:
    """Prices of the account's own: twice the list's for prompts of any length, and ten times for priority."""
    listed = service.services.price_book.price_in_force(service.model, time.time_ns())
    own = replace(listed, book=account_book(service.account_id), input_nano_per_m=2 * listed.input_nano_per_m)
    dear = replace(listed, tier=Tier.PRIORITY.value, output_nano_per_m=10 * listed.output_nano_per_m, request_nano=333)
    with service.services.database.write() as connection:
        for row in (own, dear):
            set_price(connection, replace(row, effective_from_ns=1, effective_to_ns=None))
    await service.services.price_book.refresh()


class TestBooksAndTiers:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_priority_is_served_priced_recorded_and_said(self, service: Service, stream: bool) -> None:  # noqa: FBT001 - a table's column
        await cheap_and_dear(service)
        for asked, said, tier in (("priority", "priority", "priority"), ("auto", "default", "standard")):
            options = {"stream_options": {"include_usage": True}} if stream else {}
            body = CHAT.body(service, service_tier=asked, stream=stream, **options)
            answer = await service.post(CHAT.path(service), body)
            told = orjson.loads(answer.events()[-2]) if stream else answer.json()
            row = await service.record(answer.headers["x-request-id"])
            price = service.services.price_book.by_version(row["price_version"])
            assert told["service_tier"] == said
            assert row["tier"] == price.tier == tier
            assert price.book == ("list" if tier == "priority" else account_book(service.account_id))
            charge = rate(TokenUsage(row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]), price)
            assert row["cost_nano"] == nano(told["usage"]["cost"]) == charge.cost_nano
        await service.oracle(rows=2)

    async def test_without_a_price_of_its_own_priority_is_served_as_usual_and_says_so(self, service: Service) -> None:
        answer = await service.post(CHAT.path(service), CHAT.body(service, service_tier="priority"))
        assert answer.json()["service_tier"] == "default"
        assert (await service.records())[0]["tier"] == "standard"
        assert "x-ignored-params" not in answer.headers

    async def test_who_asks_for_no_tier_is_told_of_none(self, service: Service) -> None:
        assert "service_tier" not in (await service.post(CHAT.path(service), CHAT.body(service))).json()


class TestSums:
    async def test_the_usage_of_an_account_is_the_sum_of_its_records(self, service: Service) -> None:
        for output in range(1, 8):
            await whole(service, DIALECTS[output % len(DIALECTS)], max_tokens=output)
        rows = await service.records()
        total = (await service.console(f"/accounts/{service.account_id}/usage"))["totals"]
        assert total["requests"] == len(rows) == 7
        assert total["completion_tokens"] == sum(row["completion_tokens"] for row in rows) == sum(range(1, 8))
        assert nano(total["cost"]) == sum(row["cost_nano"] for row in rows)

    async def test_native_streams_end_with_usage_and_neurons_as_a_number(self, service: Service) -> None:
        events = (await service.post(RUN.path(service), RUN.body(service, stream=True))).events()
        last = orjson.loads(events[-2])
        row = (await service.records())[0]
        assert last["response"] == ""
        assert round(last["neurons"] * MICRO) == expected_neurons_micro(service, row)


class TestWithoutAPrice:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_a_model_is_refused_and_never_free(self, service: Service, dialect: Dialect) -> None:
        with service.services.database.write() as connection:
            connection.execute(sa.delete(prices))
        await service.services.price_book.refresh()
        answer = await service.post(dialect.path(service), dialect.body(service))
        assert answer.status == 503, answer.body
        assert b"price_unavailable" in answer.body or dialect is RUN
        assert service.engine.requests == []


class TestWithoutCredit:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_nothing_runs_and_a_retry_is_not_invited(self, service: Service, dialect: Dialect) -> None:
        set_limits(service.services.database, service.account_id, concurrency=None, credit_limit_nano=1)
        answer = await service.post(dialect.path(service), dialect.body(service))
        assert answer.status == 402, answer.body
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        assert service.engine.requests == []
        await service.oracle(rows=1)
        assert (await service.records())[0]["cost_nano"] == 0

    async def test_credit_for_three_serves_three(self, service: Service) -> None:
        usage, _ = await whole(service, CHAT)
        spent = nano(usage["cost"])
        set_limits(service.services.database, service.account_id, concurrency=None, credit_limit_nano=4 * spent + 1)

        async def limited() -> bool:
            principal = await service.services.authenticator.authenticate(service.api_key)
            return principal.credit_limit_nano is not None

        await eventually_async(limited, what="the new limit")
        statuses = [(await service.post(CHAT.path(service), CHAT.body(service))).status for _ in range(5)]
        assert statuses == [200, 200, 200, 402, 402]
        assert sum(row["cost_nano"] for row in await service.records()) == 4 * spent
