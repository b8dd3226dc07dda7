"""A unit that several gateways share: one that drops it from its deployment stops it for nobody else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from gateway.lifecycle.book import Wanted
from gateway.lifecycle.keeper import Keeper
from gateway.lifecycle.states import By, Record, State, Unit, Wish, Wished
from gateway.lifecycle.tables import unit_deployers
from tenancy.database import Database
from tests.doubles.waiting import eventually
from tests.gateway.lifecycle.house import Engine, House, running
from tests.tenancy.clock import SettableClock

SHARED = Unit("model", "shared")


@pytest.fixture
def house(database: Database, clock: SettableClock) -> House:
    return House(database, clock)


def _keeper(house: House, owner: str) -> Keeper:
    keeper = house.keeper(owner)
    keeper.want({SHARED: Wanted(house.engine, Wish.AWAKE)})
    return keeper


def _record(house: House) -> Record | None:
    return next(iter(house.store.of([SHARED])), None)


async def _is(house: House, state: State, owner: str) -> None:
    def so() -> bool:
        record = _record(house)
        return record is not None and (record.state, record.owner) == (state, owner)

    await eventually(so, what=f"a unit of {owner} that is {state}")


async def _both_have_it(house: House) -> None:
    def so() -> bool:
        with house.database.read() as connection:
            return set(connection.scalars(sa.select(unit_deployers.c.keeper))) == {"one", "other"}

    await eventually(so, what="two that have it")


@contextlib.asynccontextmanager
async def _two(house: House) -> AsyncIterator[tuple[Keeper, Keeper]]:
    """One that owns the unit, which is ready, and another that has it too."""
    one, other = _keeper(house, "one"), _keeper(house, "other")
    async with running(one):
        await _is(house, State.READY, "one")
        async with running(other):
            await _both_have_it(house)
            yield one, other


async def _looks(house: House, times: int) -> None:
    seen = house.calls["of"]
    await eventually(lambda: house.calls["of"] > seen + times, what="some looks")


async def test_a_unit_that_its_owner_drops_goes_on_for_the_others_and_ends_with_the_last(house: House) -> None:
    async with _two(house) as (one, other):
        one.want({})
        await _is(house, State.READY, "other")
        await _looks(house, 10)
        assert house.engine.said == ["start"]
        other.want({})
        await eventually(lambda: _record(house) is None, what="a forgotten unit")
        assert house.engine.said.count("start") == 1
        assert not house.engine.runs


async def test_a_unit_that_another_owns_is_not_stopped_by_whoever_drops_it(house: House) -> None:
    async with _two(house) as (_, other):
        other.want({})
        await eventually(lambda: house.calls["drop"] >= 1, what="that it was dropped")
        await _looks(house, 10)
        await _is(house, State.READY, "one")
        assert house.engine.said == ["start"]


async def test_what_a_killed_gateway_had_alone_at_the_end_is_stopped_by_one_that_dropped_it_before(
    house: House, clock: SettableClock
) -> None:
    one, other = _keeper(house, "one"), _keeper(house, "other")
    async with running(one):
        await _is(house, State.READY, "one")
        killed = asyncio.create_task(other.run())
        await _both_have_it(house)
        one.want({})
        await _is(house, State.READY, "other")
        house.away = True  # so that it leaves no trace of its end
        killed.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killed
        house.engine.runs = True  # as a workload of a cluster would
        house.away = False
        await _looks(house, 2)
        assert house.engine.runs
        clock.advance_s(11)
        await eventually(lambda: _record(house) is None, what="a forgotten unit")
        assert not house.engine.runs


async def test_one_that_is_wanted_again_before_the_others_dropped_it_goes_on(house: House) -> None:
    async with _two(house) as (one, other):
        one.want({})
        await _is(house, State.READY, "other")
        one.want({SHARED: Wanted(house.engine, Wish.AWAKE)})
        await _both_have_it(house)
        other.want({})
        await _is(house, State.READY, "one")
        house.store.wish(SHARED, Wished(Wish.ASLEEP, By.OPERATOR))
        await _is(house, State.ASLEEP, "one")
    assert house.engine.starts == 1


async def test_a_unit_whose_driver_changes_here_keeps_what_others_drive(house: House) -> None:
    async with _two(house) as (one, other):
        new = Engine()
        one.want({SHARED: Wanted(new, Wish.AWAKE, driven_by="another workload")})
        await eventually(lambda: house.calls["drop"] >= 1, what="that the old one was dropped")
        await _looks(house, 10)
        assert house.engine.runs, "the other gateway sends its requests there"
        other.want({SHARED: Wanted(new, Wish.AWAKE, driven_by="another workload")})
        await eventually(lambda: new.runs and not house.engine.runs, what="the new one alone")
