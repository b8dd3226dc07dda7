"""A unit of engines that something else runs: both halves are switched, the engines themselves say how they are."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from backends.client import EngineClient
from backends.connections import open_session
from backends.drivers.managed import ManagedDriver, ManagedEngine
from backends.drivers.switches import Switches
from backends.drivers.systemd import SystemdSwitch
from backends.managed import Managed
from backends.settings import BackendSettings
from tests.doubles.engine import ScriptedEngine


@dataclass
class Lamp:
    """A switch that remembers."""

    lit: bool = False
    why: str = ""

    async def on(self) -> None:
        self.lit = True

    async def off(self) -> None:
        self.lit = False

    async def runs(self) -> bool:
        return self.lit

    async def said(self) -> str:
        return self.why


@pytest.fixture
async def clients() -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    """Of an engine that answers, and of one that does not."""
    session = open_session()
    async with ScriptedEngine() as engine:
        yield tuple(EngineClient(url, session, BackendSettings()) for url in (engine.url, "http://127.0.0.1:9"))  # type: ignore[misc]  # two of them
    await session.close()


async def test_all_engines_of_a_unit_are_switched_together(clients: tuple[EngineClient, EngineClient]) -> None:
    lamps = [Lamp(), Lamp(lit=True)]
    driver = ManagedDriver([ManagedEngine(str(number), lamp, clients[0]) for number, lamp in enumerate(lamps)])
    assert not await driver.running()
    await driver.start()
    assert await driver.running()
    await driver.leave()
    assert await driver.running(), "nothing ends with the gateway"
    await driver.stop()
    assert not any(lamp.lit for lamp in lamps)


async def test_why_one_does_not_run_is_said_with_its_name(clients: tuple[EngineClient, EngineClient]) -> None:
    lamps = {"one": Lamp(lit=True), "other": Lamp(why="out of memory")}
    driver = ManagedDriver([ManagedEngine(name, lamp, clients[0]) for name, lamp in lamps.items()])
    assert not await driver.running()
    assert driver.last_words() == "other: out of memory"
    await driver.start()
    assert driver.last_words() == ""


async def test_it_is_ready_when_every_engine_answers(clients: tuple[EngineClient, EngineClient]) -> None:
    answers, silent = (ManagedEngine("engine", Lamp(lit=True), client) for client in clients)
    assert await ManagedDriver([answers]).ready()
    assert not await ManagedDriver([answers, silent]).ready()
    assert not await ManagedDriver([answers, silent]).busy(), "nothing runs where nobody answers"


async def test_memory_is_given_up_and_taken_back_by_the_engine_itself(
    clients: tuple[EngineClient, EngineClient],
) -> None:
    driver = ManagedDriver([ManagedEngine("engine", Lamp(lit=True), clients[0])])
    await driver.release()
    await driver.resume()
    assert await driver.ready()


async def test_the_file_names_the_switch() -> None:
    switches = Switches()
    assert isinstance(switches.of(Managed(systemd="pagegate-engine@a.service")), SystemdSwitch)
    assert not isinstance(switches.of(Managed(kubernetes="deployment/a")), SystemdSwitch)
    await switches.close()
