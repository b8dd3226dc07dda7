"""Engines as processes of the gateway's own: SGLang's too, which is put on a leash."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from backends import supervision
from backends.client import EngineClient
from backends.connections import EngineSession, open_session
from backends.drivers.processes import Ports, ProcessesDriver
from backends.settings import BackendSettings
from backends.sglang.launch import engine_commands
from tests.backends.sglang.deployments import attached
from tests.doubles.waiting import eventually
from tests.engines import free_port

# In place of SGLang's interpreter.
STAND_IN = """#!/bin/sh
echo $$ > {pid}
exec sleep 600
"""


@pytest.fixture
async def session() -> AsyncIterator[EngineSession]:
    opened = open_session()
    yield opened
    await opened.close()


def driver_of(folder: Path, session: EngineSession, *, host: str = "127.0.0.1") -> ProcessesDriver:
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN.format(pid=folder / "pid"))
    stand_in.chmod(0o755)
    launch = {"python": str(stand_in), "host": host, "port": free_port()}
    replica = {"name": "a", "launch": launch, "weights": {"checkpoint": "/m", "precision": "fp8"}}
    model = attached(replicas=[replica], serverless={})
    [(name, _, engine)] = model.engines()
    clients = {name: EngineClient(engine.base_url, session, BackendSettings())}
    return ProcessesDriver(engine_commands(model), clients, folder, Ports())


async def test_sglang_is_started_as_its_command_says_and_stopped(tmp_path: Path, session: EngineSession) -> None:
    driver, said = driver_of(tmp_path, session), tmp_path / "pid"
    await driver.start()
    await eventually(lambda: said.exists() and bool(said.read_text().strip()), what="a process")
    process = psutil.Process(int(said.read_text()))
    assert await driver.running()
    assert process.ppid() == psutil.Process().pid
    await driver.stop()
    assert not process.is_running()
    assert not await driver.running()
    assert driver.last_words() == ""


async def test_an_engine_of_another_machine_is_not_started_here(tmp_path: Path, session: EngineSession) -> None:
    driver = driver_of(tmp_path, session, host="192.0.2.7")
    await driver.start()
    async with asyncio.timeout(60):
        while await driver.running():  # noqa: ASYNC110 - a task of the driver's has no event of ours
            await asyncio.sleep(0.01)
    assert driver.last_words().startswith("a can't be started: 192.0.2.7 is no address of this machine")
    assert not (tmp_path / "pid").exists()


async def test_an_engine_that_hangs_and_outlives_its_launcher_is_ended_by_the_next_stop(
    tmp_path: Path, session: EngineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.supervision._LEAVES_S_MAX", 0.1)
    driver = driver_of(tmp_path, session)
    hung = await asyncio.create_subprocess_exec("/bin/sleep", "600", start_new_session=True)
    try:
        (tmp_path / "a.pid").write_text(f"{hung.pid} {supervision._born(hung.pid)}\n")
        await driver.stop()
        assert await hung.wait() == -signal.SIGKILL
        await driver.stop()  # there is nothing more
    finally:
        if hung.returncode is None:
            hung.kill()
            await hung.wait()
