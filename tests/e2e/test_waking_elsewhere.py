"""A unit that a gateway of another region starts beside itself: a request here wakes it there, by a wish in SQL."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.lifecycle.states import Answered, Begun, Event, Failed, Record, State, Unit, Wish, advance
from gateway.lifecycle.store import UnitStore
from tenancy import provisioning
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually, eventually_async
from tests.e2e.deployments import MODEL, model, write_deployment
from tests.e2e.dialects import CHAT
from tests.e2e.service import Answer, Service, running_service

HOME, ELSEWHERE = "eu-west", "us-east"
THERE = Unit(MODEL, "r1", "a-place-there")


@dataclass
class World:
    """A gateway at home with an attached engine; of the other region's gateway, which the test plays, it knows SQL."""

    service: Service
    home: ScriptedEngine
    elsewhere: ScriptedEngine

    @property
    def store(self) -> UnitStore:
        return self.service.services.lifecycle.store

    def known(self) -> list[Record]:
        return self.service.services.lifecycle.waking.records(MODEL)

    def comes_to(self, *events: Event) -> None:
        """An owner's steps."""
        for event in events:
            record = self.store.take(THERE, "owner there")
            assert record is not None
            limits = self.service.services.settings.lifecycle.start_limits()
            assert self.store.save(record, advance(record, event, record.lease_until_ns, limits)) is not None

    async def is_seen(self, state: State) -> None:
        await eventually(lambda: [one.state for one in self.known()] == [state], what=f"that it is {state} there")

    async def bind(self, region: str) -> None:
        """The account, and wait until that holds."""
        service, database = self.service, self.service.services.database
        await database.call(provisioning.set_regions, database, service.account_id, [region])

        async def holds() -> bool:
            answer = await service.send("GET", f"/console/v1/accounts/{service.account_id}/limits")
            return bool(answer.json()["regions"] == [region])

        await eventually_async(holds, what="a bound account")

    def asks(self) -> "asyncio.Task[Answer]":
        return asyncio.create_task(self.service.post(CHAT.path(self.service), CHAT.body(self.service)))

    async def is_woken(self) -> None:
        await eventually(lambda: self.store.of([THERE])[0].wish is Wish.AWAKE, what="a wish for the one there")


@pytest.fixture
async def world(tmp_path: Path, checkpoint: Path) -> AsyncIterator[World]:
    async with ScriptedEngine() as home, ScriptedEngine() as elsewhere:
        launch = {"program": "local", "python": sys.executable, "port": int(elsewhere.url.rpartition(":")[2])}
        deployed = model(checkpoint, replicas=[home, {"launch": launch, "region": ELSEWHERE}])
        file = write_deployment(tmp_path / "deployment.toml", deployed)
        async with running_service(
            tmp_path / "home",
            checkpoint,
            home,
            deployment=file,
            region=HOME,
            embedding_model_id="",
            lifecycle={"poll_interval_s": 0.05, "start_seconds_expected": 2},
        ) as service:
            found = World(service, home, elsewhere)
            found.store.add([(THERE, Wish.ASLEEP)])
            assert found.store.take(THERE, "owner there") is not None
            await found.is_seen(State.ASLEEP)
            yield found


async def test_a_request_that_may_be_served_only_there_wakes_it_and_waits(world: World) -> None:
    await world.bind(ELSEWHERE)
    asked = world.asks()
    await world.is_woken()
    assert not world.elsewhere.requests
    world.comes_to(Begun(), Answered())
    assert (await asked).status == 200
    assert (len(world.home.requests), len(world.elsewhere.requests)) == (0, 1)
    await world.service.oracle(rows=1)


async def test_whoever_waits_for_one_there_that_fails_is_told_so_although_home_serves(world: World) -> None:
    await world.bind(ELSEWHERE)
    asked = world.asks()
    await world.is_woken()
    for _ in range(world.service.services.settings.lifecycle.start_failures_max):
        world.comes_to(Begun(), Failed("no memory"))
    answer = await asked
    assert (answer.status, CHAT.error_of(answer.json())[0]) == (503, "engine_unavailable")
    await world.bind(HOME)
    assert (await world.asks()).status == 200


async def test_one_whose_owner_is_silent_is_judged_by_what_it_answers(world: World) -> None:
    [record] = world.store.of([THERE])
    world.store.free(record)
    await eventually(lambda: not world.known(), what="that nobody says how it stands")
    await world.bind(ELSEWHERE)
    answer: Answer | None = None

    async def serves() -> bool:
        nonlocal answer
        answer = await world.asks()
        return answer.status == 200

    await eventually_async(serves, what="an answer from there")
    assert world.store.of([THERE])[0].wish is Wish.ASLEEP
