"""A process that is kept running: started again when it dies, told to stop, and fatal if it never served."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from api.siblings import socket_path
from api.workers import child as module
from api.workers.brief import Brief
from api.workers.child import Child, WorkerFailed
from tests.doubles.waiting import eventually

# Reads its brief, says that it serves by its socket's name, and notes every signal until it is told to stop.
_PROGRAM = """
import os, pathlib, signal, sys, time
(place := pathlib.Path(__file__).parent / f"booted-{os.getpid()}").touch()
while not (place.parent / "may-go-on").exists():
    time.sleep(0.01)
from api.workers.brief import Brief
brief = Brief.model_validate_json(os.read(0, 65536))
if not brief.settings:
    sys.exit(7)
folder = pathlib.Path(brief.folder)
signal.signal(signal.SIGHUP, lambda *_: (folder / "reloaded").touch())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
(folder / f"{brief.name}.sock").touch()
(folder / f"pid-{os.getpid()}").touch()
while True:
    signal.pause()
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "worker_for_tests.py").write_text(_PROGRAM)
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{Path(module.__file__).parents[2]}")
        monkeypatch.setattr(module, "_BACKOFF_FIRST_S", 0.01)
        yield folder


def _child(folder: Path, **settings: str) -> Child:
    return Child("worker_for_tests", Brief(settings=settings, number=1, folder=folder, listener=2), stop_s=10)


@pytest.mark.load
async def test_it_is_started_again_signalled_and_stopped(folder: Path) -> None:
    child = _child(folder, some="setting")
    running = asyncio.create_task(child.run(), name="child")

    def pids() -> list[int]:
        return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]

    await eventually(lambda: any(folder.glob("booted-*")), within_s=30, what="a process that has read nothing yet")
    child.signal(signal.SIGHUP)
    (folder / "may-go-on").touch()
    await eventually(lambda: len(pids()) == 1, within_s=30, what="a start")
    assert not (folder / "reloaded").exists()
    (first,) = pids()
    os.kill(first, signal.SIGKILL)
    await eventually(lambda: len(pids()) == 2, within_s=30, what="a second start")
    child.signal(signal.SIGHUP)
    await eventually((folder / "reloaded").exists, what="the signal")
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    for pid in pids():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.load
async def test_one_that_never_served_is_the_services_own_failure(folder: Path) -> None:
    (folder / "may-go-on").touch()
    with pytest.raises(WorkerFailed, match="worker 1 ended with code 7"):
        await _child(folder).run()
    assert not socket_path(folder, "1").exists()
