"""A test that never ends fails, and the others run."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.engines import ROOT

CONFTEST = """
from tests.distribution import Distribution

pytest_plugins = ["tests.hangs"]

def pytest_xdist_make_scheduler(config, log):
    return Distribution(config, log)
"""
# Whatever is raised in it, it goes on: as an event loop does that is at one of its callbacks.
DEAF = """
import threading

def wait_for_ever():
    while True:
        try:
            threading.Event().wait()
        except BaseException:
            pass
"""
IN_ITS_CALL = """
from deaf import wait_for_ever

def test_before(): pass
def test_deaf(): wait_for_ever()
def test_after(): pass
"""
IN_ITS_TEARDOWN = """
import threading

import pytest
from deaf import wait_for_ever

@pytest.fixture
def service():
    yield
    wait_for_ever()

def test_before(): pass
def test_deaf(service): threading.Event().wait()
def test_after(): pass
"""


@pytest.mark.load
async def test_a_worker_that_hangs_is_ended_and_its_other_tests_run(tmp_path: Path) -> None:
    files = {"conftest": CONFTEST, "deaf": DEAF, "test_call": IN_ITS_CALL, "test_teardown": IN_ITS_TEARDOWN}
    for name, content in files.items():
        (tmp_path / f"{name}.py").write_text(content)
    bounds = {"timeout": 0.5, "faulthandler_timeout": 2, "faulthandler_exit_on_timeout": "true", "teardown_timeout": 2}
    (tmp_path / "pytest.ini").write_text("[pytest]\n" + "".join(f"{name} = {at}\n" for name, at in bounds.items()))
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "-p", "xdist", "-p", "pytest_timeout"),
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{tmp_path}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said = (await run.communicate())[0].decode()
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()
    assert run.returncode == 1, said
    for hung in ("test_call.py::test_deaf", "test_teardown.py::test_deaf"):
        assert said.count(f"crashed while running '{hung}'") == 1, said
    assert said.count("in wait_for_ever") == 2
    assert "4 passed" in said
