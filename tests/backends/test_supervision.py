"""An engine process is started again when it dies and stopped when we are done, with real processes."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends import supervision
from backends.supervision import EngineProcess, free_port

SLEEPER = [sys.executable, "-c", "import sys; print('hello', file=sys.stderr, flush=True); sys.stdin.read()"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a process of the system has no event of ours
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_engine_is_started_again_and_a_stopped_one_is_gone(tmp_path: Path) -> None:
    engine = EngineProcess("sleeper", SLEEPER, tmp_path / "engine.log")
    running = asyncio.create_task(engine.run())
    await until(lambda: engine.pid is not None)
    first = engine.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: engine.pid is not None and engine.pid != first)
    second = engine.pid
    assert second is not None
    assert engine.starts == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not alive(second)


async def test_an_engine_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', file=sys.stderr, flush=True); sys.stdin.read()"  # noqa: E501 - one program
    log = tmp_path / "engine.log"
    engine = EngineProcess("stubborn", [sys.executable, "-c", stubborn], log, stop_s=0.2)
    running = asyncio.create_task(engine.run())
    await until(lambda: engine.pid is not None and log.exists() and "on" in log.read_text())
    pid = engine.pid
    assert pid is not None
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not alive(pid)


@pytest.mark.load
async def test_an_engine_has_stopped_when_all_of_its_parts_have_given_back_what_they_held(tmp_path: Path) -> None:
    part = (
        "import os, threading, time; held = bytearray(os.urandom(1 << 20) * 512);"
        " [threading.Thread(target=time.sleep, args=(60,), daemon=True).start() for _ in range(8)];"
        " print(os.getpid(), flush=True); time.sleep(60)"
    )
    whole = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {part!r}]); sys.stdin.read()"
    log = tmp_path / "engine.log"
    running = asyncio.create_task(EngineProcess("parts", [sys.executable, "-c", whole], log).run())
    await until(lambda: log.exists() and log.read_text().endswith("\n"))
    found = psutil.Process(int(log.read_text()))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with suppress(psutil.NoSuchProcess):
        # A zombie with threads left still has the memory of all.
        assert (found.status(), found.num_threads()) == (psutil.STATUS_ZOMBIE, 1)


async def test_an_engine_that_is_told_to_stop_while_it_starts_is_asked_and_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, may_return, spawn = tmp_path / "said", asyncio.Event(), asyncio.create_subprocess_exec

    async def returns_late(*command: str, **settings: Any) -> asyncio.subprocess.Process:
        process = await spawn(*command, **settings)
        await may_return.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", returns_late)
    program = f"trap 'echo goodbye >> {said}; exit 0' TERM; echo up > {said}; while :; do sleep 0.05; done"
    running = asyncio.create_task(EngineProcess("late", ["/bin/sh", "-c", program], tmp_path / "engine.log").run())
    await until(lambda: said.exists() and said.read_text() == "up\n")
    running.cancel()
    await asyncio.sleep(0)
    may_return.set()
    await asyncio.gather(running, return_exceptions=True)
    assert said.read_text() == "up\ngoodbye\n"


async def test_a_log_that_has_grown_too_large_is_kept_once_and_begun_anew(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_bytes(b"x" * (17 << 20))
    engine = EngineProcess("sleeper", SLEEPER, log)
    running = asyncio.create_task(engine.run())
    await until(lambda: log.stat().st_size < 1000 and b"hello" in log.read_bytes())
    assert (tmp_path / "engine.log.1").stat().st_size == 17 << 20
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_log_that_grows_too_large_while_its_engine_runs_is_begun_anew(tmp_path: Path) -> None:
    log, done = tmp_path / "engine.log", tmp_path / "done"
    writer = "import pathlib, sys; sys.stderr.write('x' * (17 << 20)); sys.stderr.flush(); pathlib.Path(sys.argv[1]).touch(); sys.stdin.read(1)"  # noqa: E501 - one program
    engine = EngineProcess("writer", [sys.executable, "-c", writer, str(done)], log, log_check_s=0.05)
    running = asyncio.create_task(engine.run())
    await until(lambda: engine.pid is not None)
    first = engine.pid
    await until(done.exists)
    await until(lambda: log.stat().st_size <= 1 << 20)
    assert engine.pid == first
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_a_free_port_is_none_that_the_system_gives_to_whoever_asks_for_any() -> None:
    assert {free_port("127.0.0.1") in range(16_384, 32_768) for _ in range(20)} == {True}


def test_where_those_are_taken_any_free_port_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(supervision, "_PORTS", [port])
        monkeypatch.setattr(supervision, "_PORTS_TRIED", 1)
        assert free_port("127.0.0.1") not in {0, port}


def test_where_none_can_be_had_it_is_said() -> None:
    with pytest.raises(OSError, match="no TCP port of"):
        free_port("192.0.2.1")


async def test_what_an_engine_that_was_killed_leaves_behind_is_ended_before_the_next_start(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"sleep 600 & echo $! >> {pids}; echo started; cat"
    engine = EngineProcess("parent", ["/bin/sh", "-c", program], tmp_path / "engine.log")
    running = asyncio.create_task(engine.run())
    await until(lambda: engine.pid is not None and pids.exists())
    child = int(pids.read_text().split()[0])
    assert alive(child)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.starts == 2)
    await until(lambda: not alive(child) or Path(f"/proc/{child}/stat").read_text().split()[2] == "Z")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_parts_of_an_engine_that_died_with_its_launcher_are_ended_before_the_next_start(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"sleep 600 & echo $! > {pids}; cat"
    left = await asyncio.create_subprocess_exec("/bin/sh", "-c", program, stdin=subprocess.PIPE, start_new_session=True)
    await until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    part = psutil.Process(int(pids.read_text()))
    (tmp_path / "engine.pid").write_text(f"{left.pid} {supervision._born(left.pid)}\n")  # as a launcher notes it
    left.kill()
    await left.communicate()
    assert part.is_running()
    engine = EngineProcess("parent", SLEEPER, tmp_path / "engine.log")
    running = asyncio.create_task(engine.run_once())
    await until(lambda: engine.starts == 1)
    with suppress(psutil.NoSuchProcess):
        assert part.status() == psutil.STATUS_ZOMBIE
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
