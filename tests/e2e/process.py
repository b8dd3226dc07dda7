"""`pagegate serve` as a real process: started, talked to, killed. Used by tests of what must survive a death.

It is forked from one that has imported the command (tests/forking.py). By its command line it is started in
tests/api/cli, in regions.py and, before SGLang, in tests/sglang_cpu.
"""

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.engines import free_port
from tests.forking import Forked, Imported

START_S_MAX = 90.0
KILLED_S_MAX = 30.0  # until one that was killed is gone


def lives(process: psutil.Process) -> bool:
    """It runs; one that has ended and waits for its parent does not. It may vanish while it is asked."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engines_among(
    processes: Iterable[psutil.Process], *, port: int | None = None, program: str = "backends.local.server"
) -> list[psutil.Process]:
    """The engines that live, whoever started them. port: only those that were told to listen there. program: the module
    that they run, the local engine's if nothing else is said.
    """
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            here = program in words and (port is None or str(port) in words)
            if here and lives(process):
                found.append(process)
    return found


@cache
def _imported() -> Imported:
    """One a test process: it is started with the first gateway."""
    return Imported("api.cli.main")


class ServeProcess:
    """One gateway process and its embedded engine, on a data folder that outlives it."""

    def __init__(self, home: Path, checkpoint: Path, **variables: str) -> None:
        self.home = home
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log_path = home.with_suffix(".log")
        self._environment = {
            "PATH": os.defpath,
            "HOME": str(home.parent),
            "PAGEGATE_HOME": str(home),
            "PAGEGATE_PORT": str(self.port),
            "PAGEGATE_ENGINE__KV_CACHE_BYTES": str(32 << 20),
            "PAGEGATE_LOG_FORMAT": "json",
            "OMP_WAIT_POLICY": "passive",  # see tests/conftest.py
            **variables,
        }
        if "PAGEGATE_DEPLOYMENT" not in variables:
            self._environment["PAGEGATE_ENGINE__CHECKPOINT"] = str(checkpoint)
        self._process: Forked | None = None

    def start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = _imported().start(["serve"], environment=self._environment, log=log)

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def exit_code(self, within_s: float) -> int:
        assert self._process is not None
        return self._process.wait(within_s)

    def engine(self) -> psutil.Process | None:
        """The engine process that the gateway has started, if it lives."""
        return next(iter(self.engines()), None)

    def engines(self) -> list[psutil.Process]:
        """All engine processes that the gateway has started and that live."""
        return engines_among(psutil.Process(self.pid).children())

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(KILLED_S_MAX)

    def hang_up(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def terminate(self) -> None:
        assert self._process is not None
        self._process.terminate()

    def bootstrap(self) -> dict[str, str]:
        content: dict[str, str] = json.loads((self.home / "bootstrap.json").read_text())
        return content

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            with urllib.request.urlopen(self.base_url + "/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return False

    def get(self, path: str, key: str) -> dict[str, Any]:
        request = urllib.request.Request(self.base_url + path, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: dict[str, Any] = json.loads(answer.read())
            return content

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(KILLED_S_MAX)


@contextlib.contextmanager
def serve_process(home: Path, checkpoint: Path, **variables: str) -> Iterator[ServeProcess]:
    """Started; not yet ready."""
    process = ServeProcess(home, checkpoint, **variables)
    process.start()
    try:
        yield process
    finally:
        process.close()
