"""Wallets, budgets and idempotency keys over real sockets: never overspent, never charged twice, always booked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from billing.budgets import BudgetPeriod
from billing.ledger.payers import AccountMode
from billing.money import usd_decimal
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT, DIALECTS, Dialect, dialect_name
from tests.e2e.service import Answer, Service


async def ask(service: Service, dialect: Dialect = CHAT, key: str | None = None, **fields: Any) -> Answer:
    headers = {} if key is None else {"idempotency-key": key}
    return await service.post(dialect.path(service), dialect.body(service, **fields), headers=headers)


async def cost_of(service: Service, dialect: Dialect = CHAT, **fields: Any) -> int:
    """What one such request costs, learnt by asking."""
    answer = await ask(service, dialect, **fields)
    assert answer.status == 200, answer.body
    return int((await service.record(answer.headers["x-request-id"]))["cost_nano"])


async def prepay(service: Service, nano: int) -> None:
    service.services.wallets.set_mode(service.account_id, AccountMode.PREPAID)
    if nano:
        service.services.wallets.top_up(service.account_id, nano, idempotency_key=f"of {nano}")
    await service.services.holds.credit.refresh()


async def balance(service: Service) -> int:
    return int((await service.console(f"/accounts/{service.account_id}/wallet"))["wallet_nano"])


@contextlib.asynccontextmanager
async def watched_balance(service: Service) -> AsyncIterator[list[int]]:
    """The wallet as it stands, again and again, while the block runs."""
    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.append(await balance(service))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch(), name="watch")
    try:
        yield seen
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


class TestWallet:
    async def test_parallel_requests_spend_what_is_there_and_never_more(self, service: Service) -> None:
        # The double makes exactly max_tokens, so a hold is what it costs and five fit exactly.
        each = await cost_of(service)
        await prepay(service, 5 * each)
        async with watched_balance(service) as seen:
            answers = await asyncio.gather(*(ask(service) for _ in range(40)))
        statuses = [answer.status for answer in answers]
        assert (statuses.count(200), statuses.count(402)) == (5, 35)
        assert await balance(service) == 0
        assert min(seen) >= 0
        await service.oracle(rows=41)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    @pytest.mark.parametrize("stream", [False, True])
    async def test_failures_of_the_engine_leave_nothing_held(
        self,
        service: Service,
        dialect: Dialect,
        stream: bool,  # noqa: FBT001 - a table's column
    ) -> None:
        each = await cost_of(service, dialect)
        await prepay(service, each)
        for _ in range(5):
            service.engine.steer(error_after=0)
            await ask(service, dialect, stream=stream)
        await eventually_async(lambda: _nothing_held(service), what="nothing held")
        assert await balance(service) == each
        service.engine.steer()
        assert (await ask(service, dialect)).status == 200
        assert await balance(service) == 0

    async def test_a_long_stream_ends_in_time_when_the_money_does(self, service: Service) -> None:
        # Room for the first hold of 1,024 outputs and not for the next.
        held = await cost_of(service, max_tokens=1_024)
        await prepay(service, held + 1)
        events = (await ask(service, stream=True, max_tokens=3_000)).events()
        assert b'"finish_reason":"length"' in b"".join(events)
        record = (await service.records())[0]
        assert (record["outcome"], record["code"]) == ("finished", "budget_reached")
        assert record["completion_tokens"] < 3_000
        await service.oracle(rows=2)

    async def test_a_refund_goes_back_and_is_told_by_ledger_and_wallet(self, service: Service) -> None:
        each = await cost_of(service)
        await prepay(service, each)
        answer = await ask(service)
        request_id = answer.headers["x-request-id"]
        assert await balance(service) == 0
        service.services.wallets.reverse(service.account_id, f"usage:{request_id}")
        assert await balance(service) == each
        newest = (await service.console(f"/accounts/{service.account_id}/ledger?limit=1"))["transactions"][0]
        assert newest["reverses"] == f"usage:{request_id}"
        await service.services.holds.credit.refresh()
        assert (await ask(service)).status == 200
        await service.oracle(rows=3)


class TestBudgets:
    async def test_a_small_key_of_a_rich_account_gets_its_budget_and_no_more(self, service: Service) -> None:
        each = await cost_of(service)
        key_id = (await service.records())[0]["key_id"]
        await prepay(service, 10**12)
        service.services.budgets.add(service.account_id, 2 * each, BudgetPeriod.TOTAL, key_id=key_id)
        await service.services.holds.credit.refresh()
        answers = await asyncio.gather(*(ask(service) for _ in range(20)))
        refused = [answer for answer in answers if answer.status == 429]
        assert len(refused) == 19
        assert {answer.headers["x-should-retry"] for answer in refused} == {"false"}
        assert {answer.json()["error"]["code"] for answer in refused} == {"budget_exceeded"}
        (budget,) = (await service.console(f"/accounts/{service.account_id}/budgets"))["budgets"]
        assert budget["spent_nano"] == budget["limit_nano"] == 2 * each
        await service.oracle(rows=21)

    async def test_one_that_is_set_by_the_console_holds_from_its_answer_on(self, service: Service) -> None:
        each = await cost_of(service)
        budgets = f"/console/v1/accounts/{service.account_id}/budgets"
        body = {"limit": usd_decimal(3 * each), "period": "total"}
        added = await service.send("POST", budgets, body, key=service.admin_key)
        answers = await asyncio.gather(*(ask(service) for _ in range(10)))
        assert sorted(answer.status for answer in answers) == [200] * 2 + [429] * 8
        removed = await service.send("DELETE", f"{budgets}/{added.json()['id']}", key=service.admin_key)
        assert removed.status == 204
        assert (await ask(service)).status == 200
        await service.oracle(rows=12)

    async def test_a_budget_for_one_model_binds_that_model_alone(self, service: Service) -> None:
        service.services.budgets.add(service.account_id, 0, BudgetPeriod.DAY, model=service.model)
        assert (await ask(service)).status == 429
        service.services.budgets.add(service.account_id, 0, BudgetPeriod.DAY, model="@cf/another")
        service.services.budgets.remove(
            service.account_id, service.services.budgets.standings(service.account_id)[0].budget.id
        )
        await service.services.holds.credit.refresh()
        assert (await ask(service)).status == 200


@pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
class TestIdempotency:
    async def test_a_retry_is_answered_and_charged_once(self, service: Service, dialect: Dialect) -> None:
        first, again = [await ask(service, dialect, "k1") for _ in range(2)]
        assert first.status == again.status == 200
        assert again.body == first.body
        assert again.headers["idempotent-replayed"] == "true"
        assert (await ask(service, dialect, "k1", max_tokens=9)).status == 422
        await service.oracle(rows=1)

    async def test_a_client_that_lost_its_connection_finds_the_answer(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(itl_ms=20)
        losing = asyncio.create_task(ask(service, dialect, "k1"), name="losing client")
        await eventually(lambda: bool(service.engine.live), what="a running request")
        losing.cancel()
        await asyncio.gather(losing, return_exceptions=True)
        assert (await ask(service, dialect, "k1")).status == 409

        async def answered() -> bool:
            return (await ask(service, dialect, "k1")).status == 200

        await eventually_async(answered, what="the kept answer")
        await service.oracle(rows=1)
        assert (await service.records())[0]["outcome"] == "finished"

    async def test_a_stream_that_was_left_is_charged_once(self, service: Service, dialect: Dialect) -> None:
        assert (await ask(service, dialect, "k1", stream=True)).status == 200
        again = await ask(service, dialect, "k1", stream=True)
        assert again.status == 409
        assert (await service.records())[0]["id"].encode() in again.body
        await service.oracle(rows=1)


async def test_every_view_of_a_period_has_the_same_sums(service: Service) -> None:
    for number, dialect in enumerate([*DIALECTS, *DIALECTS], start=1):
        await ask(service, dialect, max_tokens=number)
    await ask(service, max_tokens=1, model="@cf/unknown")  # refused: in no sum
    base = f"/accounts/{service.account_id}"
    rows = await service.records()
    expected = sum(row["cost_nano"] for row in rows)
    for group_by in ("none", "model", "key", "day", "hour", "endpoint", "outcome"):
        usage = await service.console(f"{base}/usage?group_by={group_by}")
        assert usage["totals"]["cost_nano"] == expected
        if usage["groups"]:
            assert sum(group["cost_nano"] for group in usage["groups"]) == expected
            assert sum(group["requests"] for group in usage["groups"]) == len(rows) == 8
    costs = await service.console(f"{base}/costs")
    assert costs["totals"]["cost_nano"] == sum(group["cost_nano"] for group in costs["groups"]) == expected
    assert (await service.console(f"{base}/wallet"))["owed_nano"] == expected


async def _nothing_held(service: Service) -> bool:
    return bool((await service.console("/invariants"))["held_nano"] == 0)
