"""Two models on a machine that holds one of them: who is needed wakes, who is idle sleeps, who is busy stays."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.topology import Deployment
from gateway.lifecycle.book import Wanted
from gateway.lifecycle.keeper import Keeper
from gateway.lifecycle.states import By, Depth, State, Unit, Wish, Wished
from tenancy.database import Database, open_database
from tests.backends.test_topology import model, replica
from tests.doubles.waiting import eventually
from tests.gateway.lifecycle.house import Engine, House, running
from tests.migrated import copy_migrated
from tests.tenancy.clock import SettableClock

pytestmark = pytest.mark.load

A, B = Unit("a", "u", "here"), Unit("b", "u", "here")


@pytest.fixture
def database(tmp_path: Path) -> Any:
    copy_migrated(tmp_path)
    database = open_database(f"sqlite:///{tmp_path / 'pagegate.db'}")
    yield database
    database.close()


class Two(House):
    """Engines by unit; the machine holds one of them."""

    def __init__(self, database: Database, clock: SettableClock) -> None:
        super().__init__(database, clock)
        self.engines = {A: Engine(), B: Engine()}

    def deployment(self, **serverless: Any) -> Deployment:
        models = [
            model(
                id=unit.model,
                replicas=[replica(name="u", url=None, launch={"port": 30_000 + number}, machine="box", memory_gib=6)],
                serverless=serverless if unit is A else {},
            )
            for number, unit in enumerate((A, B))
        ]
        return Deployment.model_validate({"models": models, "machines": [{"name": "box", "memory_gib": 8}]})

    @asynccontextmanager
    async def both(self, **serverless: Any) -> AsyncIterator[Keeper]:
        """A is awake and has been for a while."""
        keeper = self.keeper()
        keeper.rooms.serve(self.deployment(**serverless))
        keeper.want({unit: Wanted(engine, Wish.ASLEEP) for unit, engine in self.engines.items()})
        async with running(keeper):
            await self.are(a=State.ASLEEP, b=State.ASLEEP)
            self.wake(A)
            await self.are(a=State.READY, b=State.ASLEEP)
            self.clock.advance_s(60)
            yield keeper

    def wake(self, unit: Unit) -> None:
        self.store.wish(unit, Wished(Wish.AWAKE, By.REQUEST))

    async def are(self, a: State, b: State) -> None:
        await eventually(lambda: [one.state for one in self.store.of([A, B])] == [a, b], what=f"units {a} and {b}")
        assert sum(engine.runs for engine in self.engines.values()) <= 1, "they never run side by side"


@pytest.fixture
def two(database: Database) -> Two:
    return Two(database, SettableClock())


async def test_an_idle_unit_sleeps_so_that_another_wakes_and_the_other_way_round(two: Two) -> None:
    async with two.both():
        two.wake(B)
        await two.are(a=State.ASLEEP, b=State.READY)
        [slept, _] = two.store.of([A, B])
        assert (slept.wish, slept.wish_by) == (Wish.ASLEEP, By.PLACEMENT)
        two.clock.advance_s(60)
        two.wake(A)
        await two.are(a=State.READY, b=State.ASLEEP)


async def test_a_busy_unit_stays_until_its_requests_have_ended(two: Two) -> None:
    async with two.both() as keeper:
        two.engines[A].works = True
        two.wake(B)
        await eventually(lambda: B in keeper.rooms.waiting, what="a unit that waits for memory")
        await two.are(a=State.READY, b=State.ASLEEP)
        two.engines[A].works = False
        await two.are(a=State.ASLEEP, b=State.READY)


async def test_one_that_has_just_woken_is_not_put_to_sleep_before_it_has_served(two: Two) -> None:
    async with two.both() as keeper:
        two.wake(B)
        await two.are(a=State.ASLEEP, b=State.READY)
        two.wake(A)
        await eventually(lambda: A in keeper.rooms.waiting, what="a unit that waits for memory")
        await two.are(a=State.ASLEEP, b=State.READY)
        two.clock.advance_s(6)
        await two.are(a=State.READY, b=State.ASLEEP)


async def test_room_that_is_made_for_one_is_not_taken_by_another(two: Two) -> None:
    async with two.both() as keeper:
        two.engines[A].stop_is_over.clear()
        two.engines[A].said.clear()
        two.wake(B)
        await eventually(lambda: "stop" in two.engines[A].said, what="a unit that is put to sleep")
        two.wake(A)  # it is asked for again, too late
        two.engines[A].stop_is_over.set()
        await two.are(a=State.ASLEEP, b=State.READY)
        await eventually(lambda: keeper.rooms.waiting == {A}, what="a unit that waits its turn")
        two.clock.advance_s(60)
        await two.are(a=State.READY, b=State.ASLEEP)
        assert keeper.rooms.waiting == set()


async def test_it_sleeps_as_deep_as_its_model_says(two: Two) -> None:
    async with two.both(depth="released"):
        two.wake(B)
        await eventually(
            lambda: [one.state for one in two.store.of([A, B])] == [State.ASLEEP, State.READY], what="the other one"
        )
        assert two.store.of([A])[0].depth is Depth.RELEASED
