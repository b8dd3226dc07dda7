"""Waiting, refusing and evicting at a full replica: in order, in time, and with a Retry-After that can be used."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.doubles.engine import ScriptedEngine
from tests.doubles.own_time import OwnTime
from tests.doubles.script import Refusal
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT, COMPLETIONS, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.service import Answer, Service, running_service

POOL_TOKENS = 1_024
WHOLE_POOL = 800  # with its prompt, a request of so many tokens leaves no room for a second one
# The limit is 100 ms on a quiet machine; a test allows five times that.
REJECTED_WITHIN_S = 0.5

Start = Callable[..., contextlib.AbstractAsyncContextManager[Service]]


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(pool_tokens=POOL_TOKENS) as engine:
        yield engine


@pytest.fixture
def start(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> Start:
    """Starts a gateway in front of the small engine, with settings of the gateway's own."""
    return lambda **gateway: running_service(tmp_path / "home", checkpoint, engine, gateway=gateway)


@contextlib.asynccontextmanager
async def occupied(service: Service) -> AsyncIterator[None]:
    """While it is open, one stream holds nearly the whole pool."""
    service.engine.steer(itl_ms=20)
    body = CHAT.body(service, stream=True, max_tokens=WHOLE_POOL)
    before = len(service.engine.live)
    async with service.open_stream(CHAT.path(service), body) as response:
        assert response.status == 200
        await eventually(lambda: len(service.engine.live) == before + 1, what="an occupied engine")
        yield


def waiting(service: Service) -> int:
    return len(service.services.fleet.of(service.model).room)


def ask(service: Service, dialect: Dialect = CHAT, **fields: Any) -> asyncio.Task[Answer]:
    body = dialect.body(service, **({"max_tokens": WHOLE_POOL} | fields))
    return asyncio.create_task(service.post(dialect.path(service), body), name="a client")


def invites_a_retry(answer: Answer) -> bool:
    return "retry-after" in answer.headers and 1 <= int(answer.headers["retry-after"]) <= 60


class TestFiguresOfTheEngine:
    async def test_an_operator_sees_what_its_metrics_say_and_nothing_once_it_is_unknown(
        self, start: Start, engine: ScriptedEngine
    ) -> None:
        async with start(figures_interval_s=0.1, poll_failures_max=1) as service:

            async def figures() -> Any:
                (model,) = (await service.console("/capacity"))["models"]
                return model["replicas"][0]["engine"]

            async def told() -> bool:
                return await figures() is not None

            async def untold() -> bool:
                return await figures() is None

            await eventually_async(told, what="the engine's figures")
            assert (await figures())["evictable_tokens"] == 0
            assert (await figures())["tags_active"] is None  # this engine has no tags
            engine.steer(loads="error")
            await eventually_async(untold, what="an engine that says nothing")


class TestNeverFits:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_a_prompt_above_the_pool_is_refused_at_once_and_nobody_else_notices(
        self, service: Service, dialect: Dialect
    ) -> None:
        words = "word " * (2 * POOL_TOKENS)
        prompt = {"prompt": words} if dialect is COMPLETIONS else {"messages": [{"role": "user", "content": words}]}
        async with asyncio.timeout(20):
            answer = await service.post(dialect.path(service), dialect.body(service, **prompt))
        assert answer.status == (413 if dialect is RUN else 400), answer.body
        assert "retry-after" not in answer.headers
        assert service.engine.requests == []
        assert (await service.post(dialect.path(service), dialect.body(service))).status == 200

    async def test_a_large_max_tokens_is_clamped_to_the_pool_instead(self, service: Service) -> None:
        service.engine.steer(tokens=1)
        answer = await service.post(CHAT.path(service), CHAT.body(service, max_tokens=1_000_000))
        assert answer.status == 200, answer.body
        assert service.engine.requests[-1].body["max_tokens"] < POOL_TOKENS


class TestWaiting:
    async def test_those_who_wait_are_served_in_order_of_arrival(self, service: Service) -> None:
        async with occupied(service):
            asked = []
            for position in range(4):
                asked.append(ask(service, messages=[{"role": "user", "content": "x" * (position + 1)}]))
                await eventually(lambda: waiting(service) == len(asked), what="one more waiting")
            service.engine.steer(tokens=1)
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 4
        lengths = [len(received.body["input_ids"]) for received in service.engine.requests[1:]]
        assert lengths == sorted(lengths)
        await service.oracle(rows=5)

    async def test_the_pool_is_never_over_full(self, service: Service) -> None:
        service.engine.steer(itl_ms=1)
        answers = await asyncio.gather(*(ask(service, max_tokens=200) for _ in range(12)))
        assert {answer.status for answer in answers} == {200}
        assert 0 < service.engine.peak_used_tokens <= POOL_TOKENS
        await service.oracle(rows=12)

    async def test_a_deadline_in_the_queue_evicts_and_costs_nothing(self, start: Start) -> None:
        async with start(queue_wait_seconds_max=0.3) as service:
            async with occupied(service):
                answer = await ask(service)
                native = await ask(service, RUN)
            assert (answer.status, native.status) in {(429, 429), (503, 503)}, answer.body
            assert invites_a_retry(answer)
            assert invites_a_retry(native)
            assert RUN.error_of(native.json())[0] == 3040
            await service.oracle(rows=3)
            _, *evicted = sorted(await service.records(), key=lambda row: row["started_at"])
            assert {(row["outcome"], row["cost_nano"]) for row in evicted} == {("evicted", 0)}
            assert len(service.engine.requests) == 1

    async def test_a_full_queue_refuses_the_next_at_once(self, start: Start) -> None:
        async with start(queue_entries_max=1) as service:
            async with occupied(service):
                patient = ask(service)
                await eventually(lambda: waiting(service) == 1, what="a full queue")
                answer = await ask(service)
                assert answer.status == 429, answer.body
                assert invites_a_retry(answer)
                service.engine.steer(tokens=1)
            assert (await patient).status == 200
            await service.oracle(rows=3)


class TestRejectIfBusy:
    @pytest.mark.parametrize("dialect", [CHAT, RUN], ids=dialect_name)
    async def test_refuses_at_once_with_3040(self, service: Service, dialect: Dialect) -> None:
        async with occupied(service):
            await ask(service, dialect, max_tokens=WHOLE_POOL, options={"rejectIfBusy": True})
            with OwnTime() as own:
                began = own.now()
                answer = await ask(service, dialect, options={"rejectIfBusy": True})
                took = own.since(began)
        assert answer.status == 429, answer.body
        assert answer.json()["errors"][0]["code"] == 3040
        assert invites_a_retry(answer)
        assert took < REJECTED_WITHIN_S
        await service.oracle(rows=3)

    async def test_changes_nothing_while_there_is_room(self, service: Service) -> None:
        answer = await ask(service, options={"rejectIfBusy": True}, max_tokens=8)
        assert answer.status == 200, answer.body


class TestEngineGone:
    async def test_is_said_so_with_a_time_to_retry(self, start: Start, engine: ScriptedEngine) -> None:
        async with start(queue_wait_seconds_max=0.3, poll_interval_idle_s=0.1, poll_failures_max=1) as service:
            engine.steer(loads="error")
            await eventually(lambda: not service.services.fleet.of(service.model).up, what="a replica that is down")
            for dialect in DIALECTS:
                answer = await service.post(dialect.path(service), dialect.body(service))
                assert answer.status in {429, 502, 503}, answer.body
                assert invites_a_retry(answer)
            assert (await service.send("GET", "/health/ready")).status == 503
            assert (await service.send("GET", "/health/live")).status == 200
            assert (await service.send("GET", "/v1/models")).status == 200
            engine.steer()
            await eventually(lambda: service.services.fleet.of(service.model).up, what="a replica that is up")
            assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 200

    async def test_an_engine_that_says_its_queue_is_full_is_busy_and_not_broken(self, service: Service) -> None:
        service.engine.steer(refuse=Refusal(503, b'{"message":"The request queue is full."}', {"x-inner": "1"}))
        for dialect in DIALECTS:
            answer = await service.post(dialect.path(service), dialect.body(service))
            assert answer.status >= 429, answer.body
            assert invites_a_retry(answer)
            assert b"request queue" not in answer.body
            assert "x-inner" not in answer.headers
        await service.oracle(rows=len(DIALECTS))
        assert {row["cost_nano"] for row in await service.records()} == {0}


class TestExplanations:
    async def test_an_answer_says_how_it_was_admitted_to_whoever_asks(self, start: Start) -> None:
        async with start() as service:
            body = CHAT.body(service, max_tokens=8)
            plain = await service.post(CHAT.path(service), body)
            asked = await service.post(CHAT.path(service), body, headers={"x-pagegate-explain": "1"})
        assert "x-pagegate-decision" not in plain.headers
        decision = orjson.loads(asked.headers["x-pagegate-decision"])
        assert decision["verdict"] == "fits_now"
        assert decision["replica"] == "engine-0"
        assert decision["cached_tokens"] == 0
        assert {"waited_s", "predicted_wait_s", "predicted_first_token_s", "prompt_tokens"} <= decision.keys()

    async def test_a_refusal_says_so_too(self, start: Start) -> None:
        async with start() as service, occupied(service):
            body = CHAT.body(service, max_tokens=WHOLE_POOL) | {"options": {"rejectIfBusy": True}}
            refused = await service.post(CHAT.path(service), body, headers={"x-pagegate-explain": "1"})
        assert refused.status == 429
        assert orjson.loads(refused.headers["x-pagegate-decision"])["refused"] == "capacity_exceeded"
