"""What is forked from an imported program is a process of its own, and is told apart from its siblings."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.forking import Forked, Imported

_PROGRAM = """
import os, signal, sys
with open(__file__ + ".imports", "a") as imports:
    imports.write("once")

def run(arguments):
    if arguments == ["wait"]:
        signal.pause()
    print(arguments, sorted(os.environ), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    sys.exit(int(arguments[0]))
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imported]:
    (tmp_path / "forked_program.py").write_text(_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])]))
    program = Imported("forked_program")
    yield program
    program.close()


def _started(imported: Imported, argument: str, log: Path, **environment: str) -> Forked:
    with log.open("ab") as said:
        return imported.start([argument], environment=environment, log=said)


def test_each_has_arguments_an_environment_a_log_and_an_end_of_its_own(imported: Imported, tmp_path: Path) -> None:
    first = _started(imported, "0", tmp_path / "first.log", ONE="1")
    second = _started(imported, "3", tmp_path / "second.log", OTHER="2")
    assert (first.wait(30), second.wait(30)) == (0, 3)
    assert first.pid != second.pid
    assert (tmp_path / "first.log").read_text() == "['0'] ['ONE'] True\n"
    assert (tmp_path / "second.log").read_text() == "['3'] ['OTHER'] True\n"
    assert (tmp_path / "forked_program.py.imports").read_text() == "once"


def test_it_is_awaited_killed_and_not_signalled_again(imported: Imported, tmp_path: Path) -> None:
    process = _started(imported, "wait", tmp_path / "log")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.kill()
    assert process.wait(30) == process.poll() == -signal.SIGKILL
    process.terminate()  # its pid may be another's by now


def test_what_was_forked_outlives_what_it_was_forked_from(imported: Imported, tmp_path: Path) -> None:
    process = _started(imported, "wait", tmp_path / "log")
    imported.close()
    assert process.poll() is None
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM


def test_an_end_that_nobody_saw_is_not_taken_for_a_good_one(imported: Imported, tmp_path: Path) -> None:
    process = _started(imported, "wait", tmp_path / "log")
    attends = psutil.Process(process.pid).parent()
    assert attends is not None
    attends.kill()
    with pytest.raises(AssertionError, match="is not known"):
        process.wait(30)
    os.kill(process.pid, signal.SIGKILL)
