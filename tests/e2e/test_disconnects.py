"""A client that leaves pays for what the engine produced, and leaves nothing behind, in every phase and dialect."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from tenancy.provisioning import set_limits
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.dialects import CHAT, COMPLETIONS, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.ledger import expected_cost_nano
from tests.e2e.service import Service, running_service

STREAMED = [CHAT, COMPLETIONS, RUN]
# Far above what is promised: a busy machine is no failure. What is stopped here would run on for longer.
STOP_S_MAX = 15.0


async def leave_after(service: Service, dialect: Dialect, events: int, **fields: Any) -> list[bytes]:
    """Opens a stream, reads so many events with text, closes the socket; the payloads that were read."""
    read: list[bytes] = []
    async with service.open_stream(dialect.path(service), dialect.body(service, stream=True, **fields)) as response:
        assert response.status == 200, await response.read()
        while sum(1 for payload in read if dialect.delta_of(orjson.loads(payload))) < events:
            line = await response.content.readline()
            if line.startswith(b"data: "):
                read.append(line.removeprefix(b"data: ").strip())
    return read


async def engine_stops(engine: ScriptedEngine) -> None:
    await eventually(lambda: not engine.live, within_s=STOP_S_MAX, what="a stopped engine")


async def slot_is_back(service: Service) -> None:
    """Who has left holds nothing once the record is on disk, which a busy disk makes long."""
    await eventually(lambda: not service.services.holds.live, what="a free slot")


class TestLeavingAStream:
    @pytest.mark.parametrize("dialect", STREAMED, ids=dialect_name)
    @pytest.mark.parametrize("events", [0, 1, 20, 59])
    async def test_what_was_produced_is_recorded_and_charged_once(
        self, service: Service, dialect: Dialect, events: int
    ) -> None:
        service.engine.steer(itl_ms=20, hang_after=59)  # so that leaving comes before the last token
        read = await leave_after(service, dialect, events, max_tokens=60)
        await engine_stops(service.engine)
        await service.oracle(rows=1)
        (row,) = await service.records()
        (produced,) = service.engine.produced.values()
        assert row["outcome"] == "client_disconnected"
        assert events <= row["completion_tokens"] <= produced < 60
        assert row["prompt_tokens"] == len(prompt_ids(service.engine))
        assert row["cost_nano"] == expected_cost_nano(service, row)
        if read and dialect is not RUN:
            assert row["id"] == orjson.loads(read[0])["id"]

    @pytest.mark.parametrize("dialect", STREAMED, ids=dialect_name)
    async def test_without_usage_from_the_engine_the_charge_is_an_estimate_and_never_nothing(
        self, service: Service, dialect: Dialect
    ) -> None:
        service.engine.steer(itl_ms=10, no_usage=True)
        await leave_after(service, dialect, 10, max_tokens=200)
        await engine_stops(service.engine)
        await service.oracle(rows=1)
        (row,) = await service.records()
        (produced,) = service.engine.produced.values()
        assert row["usage_source"] == "estimated"
        assert 1 <= row["completion_tokens"] <= produced
        assert row["cost_nano"] == expected_cost_nano(service, row) > 0

    async def test_an_abort_the_engine_does_not_know_is_made_up_for_by_closing_the_connection(
        self, service: Service
    ) -> None:
        service.engine.steer(itl_ms=10, abort_status=404)
        await leave_after(service, CHAT, 5, max_tokens=4_000)
        await engine_stops(service.engine)
        await service.oracle(rows=1)
        (row,) = await service.records()
        assert row["outcome"] == "client_disconnected"
        assert row["completion_tokens"] >= 5

    async def test_fifty_clients_that_leave_stop_fifty_generations(self, tmp_path: Path, checkpoint: Path) -> None:
        async with (
            ScriptedEngine(pool_tokens=1_000_000) as engine,
            running_service(tmp_path / "home", checkpoint, engine) as service,
        ):
            engine.steer(itl_ms=20)
            leaving = (leave_after(service, CHAT, 3, max_tokens=4_000) for _ in range(50))
            await asyncio.gather(*leaving)
            await engine_stops(engine)
            await service.oracle(rows=50)
            assert {row["outcome"] for row in await service.records()} == {"client_disconnected"}


class TestLeavingAWholeAnswer:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_the_engine_stops_and_the_prompt_is_charged_once(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(ttft_s=5)
        await leave_before_the_answer(service, dialect, lambda: bool(service.engine.live))
        await engine_stops(service.engine)
        await service.oracle(rows=1)
        (row,) = await service.records()
        assert row["outcome"] == "client_disconnected"
        assert row["completion_tokens"] == 0
        assert row["cost_nano"] == expected_cost_nano(service, row)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_without_usage_from_the_engine_what_it_said_is_charged(
        self, service: Service, dialect: Dialect
    ) -> None:
        service.engine.steer(itl_ms=10, no_usage=True, text="a")
        engine = service.engine
        await leave_before_the_answer(service, dialect, lambda: any(n >= 10 for n in engine.produced.values()), 400)
        await engine_stops(engine)
        await service.oracle(rows=1)
        (row,) = await service.records()
        assert (row["outcome"], row["usage_source"]) == ("client_disconnected", "estimated")
        assert row["prompt_tokens"] == len(prompt_ids(engine))
        assert 1 <= row["completion_tokens"] <= engine.produced[row["id"]]
        assert row["cost_nano"] == expected_cost_nano(service, row) > 0

    async def test_tokens_produced_before_leaving_are_charged(self, service: Service) -> None:
        service.engine.steer(itl_ms=10)
        engine = service.engine
        await leave_before_the_answer(service, CHAT, lambda: any(n >= 10 for n in engine.produced.values()), 4_000)
        await engine_stops(engine)
        await service.oracle(rows=1)
        (row,) = await service.records()
        assert row["completion_tokens"] == engine.produced[row["id"]] >= 10


class TestSlots:
    """Two at a time are allowed; whoever leaves gives the slot back, in every phase."""

    @pytest.fixture(autouse=True)
    def _two_slots(self, service: Service) -> None:
        set_limits(service.services.database, service.account_id, concurrency=2, credit_limit_nano=None)

    async def third_succeeds(self, service: Service, rows: int) -> None:
        service.engine.steer()
        async with asyncio.timeout(STOP_S_MAX):
            answer = await service.post(CHAT.path(service), CHAT.body(service))
        assert answer.status == 200, answer.body
        await service.oracle(rows=rows)

    async def test_before_the_headers(self, service: Service) -> None:
        service.engine.steer(ttft_s=30)
        for _ in range(20):
            await leave_before_the_answer(service, CHAT, lambda: bool(service.engine.live), stream=True)
            await engine_stops(service.engine)
            await slot_is_back(service)
        await self.third_succeeds(service, rows=21)

    async def test_in_mid_stream(self, service: Service) -> None:
        service.engine.steer(itl_ms=5)
        for _ in range(20):
            await leave_after(service, CHAT, 2, max_tokens=4_000)
            await engine_stops(service.engine)
            await slot_is_back(service)
        await self.third_succeeds(service, rows=21)

    async def test_after_the_last_chunk(self, service: Service) -> None:
        for _ in range(20):
            async with service.open_stream(CHAT.path(service), CHAT.body(service, stream=True)) as response:
                async for line in response.content:
                    if line.strip() == b"data: [DONE]":
                        break
            await engine_stops(service.engine)
            await slot_is_back(service)
        await self.third_succeeds(service, rows=21)

    async def test_while_it_waits_for_pages(self, service: Service) -> None:
        engine = service.engine
        engine.steer(itl_ms=20, loads_numbers={"num_used_tokens": engine.pool_tokens})
        await eventually(lambda: is_full(service), what="a full replica")
        for _ in range(20):
            await leave_before_the_answer(service, CHAT, lambda: waiting(service) == 1, stream=True)
            await eventually(lambda: waiting(service) == 0, within_s=STOP_S_MAX, what="an empty queue")
            await slot_is_back(service)
        assert engine.requests == []
        engine.steer()
        await eventually(lambda: not is_full(service), what="room at the replica")
        await self.third_succeeds(service, rows=21)
        assert {row["outcome"] for row in await service.records()} == {"client_disconnected", "finished"}

    async def test_a_third_is_refused_while_two_run(self, service: Service) -> None:
        service.engine.steer(itl_ms=20)
        body = CHAT.body(service, stream=True, max_tokens=2_000)
        async with service.open_stream(CHAT.path(service), body), service.open_stream(CHAT.path(service), body):
            await eventually(lambda: len(service.engine.live) == 2, what="two running streams")
            answer = await service.post(CHAT.path(service), CHAT.body(service))
            assert answer.status == 429, answer.body
            assert int(answer.headers["retry-after"]) >= 1
            native = await service.post(RUN.path(service), RUN.body(service))
            assert (native.status, RUN.error_of(native.json())[0]) == (429, 3021)
        await engine_stops(service.engine)
        service.engine.steer()

        async def accepted() -> bool:
            return (await service.post(CHAT.path(service), CHAT.body(service))).status == 200

        await eventually_async(accepted, within_s=STOP_S_MAX, what="a free slot")


async def leave_before_the_answer(
    service: Service, dialect: Dialect, when: Callable[[], bool], max_tokens: int = 8, *, stream: bool | None = None
) -> None:
    """Sends a request and closes the socket as soon as the condition holds, which is before any answer."""
    body = dialect.body(service, max_tokens=max_tokens, stream=stream)
    asking = asyncio.create_task(service.post(dialect.path(service), body), name="a client that leaves")
    await eventually(when, what="the moment to leave")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def prompt_ids(engine: ScriptedEngine) -> list[int]:
    body = engine.requests[-1].body
    ids = body.get("input_ids") or body["prompt"]
    assert isinstance(ids, list)
    return ids


def is_full(service: Service) -> bool:
    fleet = service.services.fleet.of(service.model)
    gate = fleet.gate(fleet.replicas[0])
    return gate is not None and gate.free_tokens < gate.page_tokens


def waiting(service: Service) -> int:
    return len(service.services.fleet.of(service.model).room)


@pytest.mark.parametrize("streamed", [False, True])
async def test_leaving_while_the_record_is_on_its_way_to_the_disk_changes_nothing_of_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, *, streamed: bool
) -> None:
    real, held, let_go = os.fdatasync, threading.Event(), threading.Event()

    def held_up(descriptor: int) -> None:
        held.set()
        assert let_go.wait(30)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", held_up)
    body = CHAT.body(service, stream=streamed, max_tokens=5)
    asking = asyncio.create_task(service.post(CHAT.path(service), body))
    await eventually(held.is_set, within_s=10.0, what="a record that waits for the disk")
    asking.cancel()
    await asyncio.wait([asking])
    await eventually(_settles_on_its_own, within_s=10.0, what="a settlement that nobody waits for any more")
    let_go.set()
    await service.oracle(rows=1)
    (row,) = await service.records()
    assert (row["outcome"], row["completion_tokens"]) == ("finished", 5)
    assert row["cost_nano"] == expected_cost_nano(service, row) > 0


def _settles_on_its_own() -> bool:
    return any(task.get_name().startswith("settle ") for task in asyncio.all_tasks())
