"""However a test of SGLang ends, nothing of its servers is left: here with a stand-in that never becomes ready."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines import ROOT

GONE_S_MAX = 20.0
# In place of SGLang's interpreter: a server of two processes, in a group as SGLang's are.
STAND_IN = """#!/bin/bash
sleep 1000 &
echo $$ $! > {pids}
wait
"""
TEST = """
from pathlib import Path

import pytest

from tests.engines import build_tiny_checkpoint
from tests.sglang_cpu import server


@pytest.mark.timeout({timeout_s})
def test_that_never_gets_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "sglang_python", lambda: Path("{stand_in}"))
    with server.{start}(build_tiny_checkpoint(tmp_path / "tiny")):
        raise AssertionError
"""


@contextlib.contextmanager
def inner_test(folder: Path, start: str, *, timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A test run of its own, with one test."""
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN.format(pids=folder / "pids"))
    stand_in.chmod(0o755)
    file = folder / "test_inner.py"
    file.write_text(TEST.format(timeout_s=timeout_s, stand_in=stand_in, start=start))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    running = subprocess.Popen(
        [*command, str(file)],
        cwd=ROOT,
        env={"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with running:
        try:
            yield running
        finally:
            running.kill()


def servers_of(folder: Path) -> list[int]:
    """Once they run."""
    deadline = time.monotonic() + 60
    while not (folder / "pids").exists() or not (folder / "pids").read_text().endswith("\n"):
        assert time.monotonic() < deadline, "the stand-in was not started"
        time.sleep(0.05)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def are_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + GONE_S_MAX
    while any(_lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.load
def test_a_test_whose_time_is_over_takes_its_servers_with_it(tmp_path: Path) -> None:
    with inner_test(tmp_path, "start_sglang", timeout_s=5) as running:
        pids = servers_of(tmp_path)
        said, _ = running.communicate(timeout=60)
        assert running.returncode == 1, said.decode()
        assert b"Timeout" in said
        assert are_gone(pids)


@pytest.mark.load
@pytest.mark.parametrize("start", ["start_sglang", "engine_up"])
def test_a_killed_test_run_takes_its_servers_with_it(tmp_path: Path, start: str) -> None:
    with inner_test(tmp_path, start, timeout_s=60) as running:
        pids = servers_of(tmp_path)
        running.send_signal(signal.SIGKILL)
        assert are_gone(pids)
