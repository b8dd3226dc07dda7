"""A model whose engines systemd runs: the gateway has one started when demand asks for it, and says so in metrics."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.lifecycle.states import By, State, Unit, Wish, Wished
from tests.doubles.engine import ScriptedEngine
from tests.doubles.script import Script
from tests.doubles.waiting import eventually
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service, running_service
from tests.stores import ValkeyServer

SLOW = Script(ttft_s=0.02, itl_ms=20.0)


@dataclass
class Scaled:
    service: Service
    engines: list[ScriptedEngine]
    calls: Path

    def started(self) -> set[str]:
        lines = self.calls.read_text().splitlines()
        return {line.removeprefix("start ") for line in lines if line.startswith("start ")}

    def states(self) -> dict[str, State]:
        records = self.service.services.lifecycle.waking.records(MODEL)
        return {record.unit.name: record.state for record in records}

    def agrees(self) -> bool:
        """Does exactly that run of which it is written, and nothing is on its way?"""
        units = [self.calls.with_name(f"pagegate-engine@{number}.service") for number in range(len(self.engines))]
        runs = [State.READY if unit.exists() and unit.read_text() == "active\n" else State.ASLEEP for unit in units]
        return [state for _, state in sorted(self.states().items())] == runs

    async def asks(self, count: int) -> list[int]:
        """Status of each of so many answers of a second or two."""
        body = CHAT.body(self.service, max_tokens=60, model=MODEL)
        answers = (self.service.post(CHAT.path(self.service), body) for _ in range(count))
        return [answer.status for answer in await asyncio.gather(*answers)]


@pytest.fixture
async def scaled(tmp_path: Path, checkpoint: Path, systemctl: Path) -> AsyncIterator[Scaled]:
    async with scaling(tmp_path, checkpoint, systemctl) as found:
        yield found


@contextlib.asynccontextmanager
async def scaling(tmp_path: Path, checkpoint: Path, systemctl: Path, **settings: Any) -> AsyncIterator[Scaled]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(SLOW, pool_tokens=640)) for _ in range(3)]
        replicas = [
            {"url": engine.url, "managed": {"systemd": f"pagegate-engine@{number}.service"}}
            for number, engine in enumerate(engines)
        ]
        deployed = model(checkpoint, replicas=replicas, serverless={"replicas_min": 1, "idle_seconds": 3600})
        service = await stack.enter_async_context(
            running_service(
                tmp_path / "home",
                checkpoint,
                engines[0],
                deployment=write_deployment(tmp_path / "deployment.toml", deployed),
                lifecycle={"poll_interval_s": 0.05, "scaling_interval_s": 0.1, "close_seconds": 0},
                **settings,
            )
        )
        found = Scaled(service, engines, systemctl.parent / "calls")
        await eventually(lambda: found.states().get("r0") is State.READY, what="one engine that is ready")
        yield found


async def test_demand_has_another_engine_started_which_then_takes_requests(scaled: Scaled) -> None:
    assert scaled.started() == {"pagegate-engine@0.service"}
    asked = asyncio.create_task(scaled.asks(24))
    await eventually(lambda: scaled.states()["r1"] is State.READY, what="a second engine")
    assert set(await asked) == {200}
    assert scaled.engines[1].requests
    text = (await scaled.service.send("GET", "/metrics")).body.decode()
    name = f'pagegate_wished_replicas{{model="{MODEL}",side="unified"}} '
    assert float(text.partition(name)[2].partition("\n")[0]) >= 2


async def test_what_an_operator_holds_asleep_is_not_started(scaled: Scaled) -> None:
    store = scaled.service.services.lifecycle.store
    place = next(record.unit.place for record in store.all())
    for name in ("r1", "r2"):
        store.wish(Unit(MODEL, name, place), Wished(Wish.HELD, By.OPERATOR))
    assert set(await scaled.asks(10)) == {200}
    assert scaled.started() == {"pagegate-engine@0.service"}


@pytest.mark.stores
async def test_a_server_of_meters_and_pages_that_dies_while_it_is_decided_starts_nothing_twice_and_loses_no_decision(
    tmp_path: Path, checkpoint: Path, systemctl: Path
) -> None:
    with ValkeyServer() as valkey:
        async with scaling(tmp_path, checkpoint, systemctl, meters_url=valkey.url, pages_url=valkey.url) as scaled:
            room = scaled.service.services.fleet.of(MODEL).room
            asked = asyncio.create_task(scaled.asks(24))
            await eventually(lambda: len(room) > 0, within_s=30, what="requests that wait")
            await asyncio.to_thread(valkey.kill)
            await eventually(lambda: scaled.states()["r1"] is State.READY, within_s=30, what="a second engine")
            await asked
            await eventually(lambda: not scaled.service.engine.live, within_s=30, what="an end of what ran")
            assert set(await scaled.asks(4)) == {200}
            calls = scaled.calls.read_text().splitlines()
            assert {calls.count(f"start {unit}") for unit in scaled.started()} == {1}, "none was started twice"
            await eventually(scaled.agrees, within_s=30, what="states that agree with what runs")
