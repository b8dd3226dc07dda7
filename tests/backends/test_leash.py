"""A command on a leash ends with whoever started it, however that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from backends.leash import leashed

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is ended before the next start"),
    pytest.mark.load,
]
SLEEPER = (sys.executable, "-c", "import sys, time; print('on', flush=True); time.sleep(600)")
# Starts a command and says who it is, then waits to be killed.
LAUNCHER = """
import os, subprocess, sys
from backends.leash import leashed
child = subprocess.Popen(leashed(sys.argv[1:], os.getpid()), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_what_is_leashed_ends_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with launcher:
        assert launcher.stdout is not None
        leashed_process = psutil.Process(int(launcher.stdout.readline()))
        assert leashed_process.cmdline() == list(SLEEPER), "it has become the command"
        launcher.kill()
    leashed_process.wait(30)


def test_a_launcher_that_is_gone_already_has_nothing_started(tmp_path: Path) -> None:
    said = tmp_path / "said"
    argv = leashed((sys.executable, "-c", f"open({str(said)!r}, 'w')"), launcher=os.getppid())
    assert subprocess.run(argv, check=False, timeout=60).returncode == 0
    assert not said.exists()


def test_it_is_told_to_stop_as_any_other_process_is() -> None:
    process = subprocess.Popen(leashed(SLEEPER, os.getpid()), stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
