"""A model that sleeps wakes for the first request: once for many, in their time; no tenant is told what failed."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.lifecycle.states import (
    Answered,
    Begun,
    By,
    Closed,
    Depth,
    Event,
    Failed,
    Record,
    Slept,
    State,
    Unit,
    Wish,
    Wished,
    advance,
)
from gateway.lifecycle.store import UnitStore
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model
from tests.e2e.dialects import CHAT, RUN, Dialect
from tests.e2e.service import Service, deployed_service
from tests.engines import free_port

FAST = {"poll_interval_s": 0.05, "start_seconds_expected": 2}


@dataclass
class Sleeper:
    """A scripted engine whose unit the test plays the owner of: the gateway knows of it by SQL alone."""

    service: Service
    engine: ScriptedEngine

    @property
    def unit(self) -> Unit:
        return Unit(MODEL, "r0")

    @property
    def store(self) -> UnitStore:
        return self.service.services.lifecycle.store

    @property
    def record(self) -> Record:
        [record] = self.store.of([self.unit])
        return record

    def comes_to(self, *events: Event) -> None:
        """An owner's steps."""
        for event in events:
            record = self.store.take(self.unit, "owner")
            assert record is not None
            limits = self.service.services.settings.lifecycle.start_limits()
            assert self.store.save(record, advance(record, event, record.lease_until_ns, limits)) is not None

    async def is_seen(self, state: State) -> None:
        def seen() -> bool:
            return [record.state for record in self.service.services.lifecycle.waking.records(MODEL)] == [state]

        await eventually(seen, what=f"that the gateway knows it {state}")

    async def is_woken(self) -> None:
        await eventually(lambda: self.record.wish is Wish.AWAKE, what="a wish")


@contextlib.asynccontextmanager
async def sleeping(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, **gateway: Any) -> AsyncIterator[Sleeper]:
    deployed = model(checkpoint, replicas=[engine])
    async with deployed_service(tmp_path, checkpoint, engine, deployed, lifecycle=FAST, gateway=gateway) as service:
        sleeper = Sleeper(service, engine)
        sleeper.store.add([(sleeper.unit, Wish.ASLEEP)])
        await sleeper.is_seen(State.ASLEEP)
        yield sleeper


@pytest.fixture
async def sleeper(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> AsyncIterator[Sleeper]:
    async with sleeping(tmp_path, checkpoint, engine) as found:
        yield found


@pytest.mark.parametrize("dialect", [CHAT, RUN], ids=["chat", "run"])
async def test_a_request_for_a_sleeping_model_wakes_it_and_waits(sleeper: Sleeper, dialect: Dialect) -> None:
    service = sleeper.service
    asked = [asyncio.create_task(service.post(dialect.path(service), dialect.body(service, stream=stream)))
             for stream in (False, True) for _ in range(3)]  # fmt: skip
    await sleeper.is_woken()
    assert not any(one.done() for one in asked)  # not even a stream has begun: it has no status yet
    sleeper.comes_to(Begun(), Answered())
    assert [(await one).status for one in asked] == [200] * 6
    assert sleeper.record.wish_by is By.REQUEST
    await service.oracle(rows=6)


async def test_a_batch_for_a_sleeping_model_wakes_it_and_runs_without_a_refusal(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.line_work._ABSENT_S", 1.0)
    service = sleeper.service
    path = RUN.path(service) + "?queueRequest=true"
    queued = await service.post(path, {"requests": [RUN.body(service)]})
    await sleeper.is_woken()
    sleeper.comes_to(Begun(), Answered())

    async def is_answered() -> bool:
        polled = await service.post(path, {"request_id": queued.json()["result"]["request_id"]})
        return "responses" in polled.json()["result"]

    await eventually_async(is_answered, what="the batch's answer")
    await service.oracle(rows=1)


async def test_who_would_not_wait_is_told_at_once_and_when_to_come_again(sleeper: Sleeper) -> None:
    service = sleeper.service
    answer = await service.post(RUN.path(service), RUN.body(service, options={"rejectIfBusy": True}))
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    code, said = RUN.error_of(answer.json())
    assert (code, MODEL in said) == (3040, True)
    await sleeper.is_woken()  # for whoever comes again
    await service.oracle(rows=1)


async def test_who_has_waited_in_vain_is_told_that_it_is_still_being_started(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    async with sleeping(tmp_path, checkpoint, engine, queue_wait_seconds_max=0.2) as sleeper:
        service = sleeper.service
        answer = await service.post(CHAT.path(service), CHAT.body(service, stream=True))
        assert (answer.status, CHAT.error_of(answer.json())[0]) == (503, "model_warming")
        [row] = await service.records()
        assert (row["code"], row["cost_nano"]) == ("model_warming", 0)


async def test_a_start_that_fails_for_good_ends_the_wait_and_tells_no_tenant_why(sleeper: Sleeper) -> None:
    service = sleeper.service
    asked = asyncio.create_task(service.post(CHAT.path(service), CHAT.body(service)))
    await sleeper.is_woken()
    for _ in range(service.services.settings.lifecycle.start_failures_max):
        sleeper.comes_to(Begun(), Failed("the key of the vault is wrong"))
    answer = await asked
    assert (answer.status, CHAT.error_of(answer.json())[0]) == (503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert b"vault" not in answer.body
    again = await service.post(CHAT.path(service), CHAT.body(service))
    assert again.status == 503
    await service.oracle(rows=2)


async def test_nothing_new_goes_to_a_unit_that_drains_and_what_runs_there_ends(sleeper: Sleeper) -> None:
    service = sleeper.service
    first = asyncio.create_task(service.post(CHAT.path(service), CHAT.body(service)))
    await sleeper.is_woken()
    sleeper.comes_to(Begun(), Answered())
    assert (await first).status == 200
    sleeper.engine.steer(itl_ms=30)
    async with service.open_stream(CHAT.path(service), CHAT.body(service, stream=True, max_tokens=40)) as response:
        await response.content.readuntil(b"\n\n")
        sleeper.store.wish(sleeper.unit, Wished(Wish.HELD, By.OPERATOR))
        sleeper.comes_to(Closed())
        await sleeper.is_seen(State.DRAINING)
        refused = await service.post(CHAT.path(service), CHAT.body(service))
        assert (refused.status, CHAT.error_of(refused.json())[0]) == (503, "engine_unavailable")
        assert b"[DONE]" in await response.content.read()
    sleeper.comes_to(Slept(Depth.STOPPED))
    await sleeper.is_seen(State.ASLEEP)
    assert (await service.send("GET", "/health/ready")).status == 200
    await service.oracle(rows=3)


async def test_a_batch_wakes_a_sleeping_model_and_runs_when_it_is_awake(sleeper: Sleeper) -> None:
    service = sleeper.service
    queued = await service.post(RUN.path(service) + "?queueRequest=true", {"requests": [{"prompt": "Say something."}]})
    assert queued.status == 200
    asked = {"request_id": queued.json()["result"]["request_id"]}
    await sleeper.is_woken()
    sleeper.comes_to(Begun(), Answered())

    async def has_run() -> bool:
        answer = (await service.post(RUN.path(service) + "?queueRequest=true", asked)).json()
        return "responses" in answer["result"]

    await eventually_async(has_run, what="an answered batch")


def launched(checkpoint: Path, **serverless: Any) -> dict[str, Any]:
    """A model on a real local engine that the gateway starts when it is needed."""
    launch = {
        "program": "local",
        "python": sys.executable,
        "port": free_port(),
        "extra": ["--kv-cache-bytes", str(32 << 20)],
    }
    engine = {"launch": launch, "weights": {"checkpoint": str(checkpoint), "precision": "bf16"}}
    return model(checkpoint, replicas=[engine], serverless={"idle_seconds": 3600, **serverless})


@pytest.mark.engine
@pytest.mark.timeout(180)
async def test_two_hundred_first_requests_at_once_start_a_real_engine_once_and_none_is_lost(
    tmp_path: Path, checkpoint: Path, engine: ScriptedEngine
) -> None:
    gateway = {"queue_tenant_entries_max": 256, "queue_wait_seconds_max": 150}
    async with deployed_service(tmp_path, checkpoint, engine, launched(checkpoint), gateway=gateway) as service:
        assert not list((tmp_path / "home").glob("r0.log"))
        asked = CHAT.body(service, max_tokens=2)
        answers = await asyncio.gather(*(service.post(CHAT.path(service), asked) for _ in range(200)))
        assert [answer.status for answer in answers] == [200] * 200
        metrics = (await service.send("GET", "/metrics")).body.decode()
        assert f'pagegate_unit_starts_total{{model="{MODEL}"}} 1.0' in metrics
        assert f'pagegate_unit_start_seconds_count{{model="{MODEL}"}} 1.0' in metrics
        assert f'pagegate_units{{model="{MODEL}",state="ready"}} 1.0' in metrics
        await service.oracle(rows=200)
