"""What every query relies on: durable SQLite, one writer at a time, bounded threads, and trouble named as such."""

import asyncio
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
import structlog

from tenancy import database as database_module
from tenancy.database import Database, insert_missing, insert_missing_ids, open_database
from tenancy.errors import TenancyUnavailable, TextUnstorable
from tenancy.tables import accounts
from tests.stores import PostgresServer
from tests.tenancy.conftest import over_both_databases


def _account(number: int) -> dict[str, object]:
    return {
        "id": f"{number:032x}",
        "name": f"account {number}",
        "created_at_ns": number,
        "suspended": False,
        "concurrency": None,
        "credit_limit_nano": None,
    }


def _count(database: Database) -> int:
    with database.read() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(accounts)) or 0


def test_sqlite_is_durable_and_strict(tmp_path: Path) -> None:
    # The driver is named: other databases of the tests do not wait for the disk (sharing_statements.py).
    database = open_database(f"sqlite+pysqlite:///{tmp_path}/durable.db")
    with database.read() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    database.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 5000}


def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    """It holds prompts of batches and answers, in a folder that may be open to others."""
    before = os.umask(0o022)
    try:
        database = open_database(f"sqlite+pysqlite:///{tmp_path}/new.db")
        with database.write() as connection:
            connection.exec_driver_sql("CREATE TABLE things (id INTEGER)")
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        database.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("new.db", "new.db-wal", "new.db-shm"), 0o600)


def test_a_new_connection_takes_no_locks_from_those_that_are_there(tmp_path: Path) -> None:
    """Who has none is gone, another process thinks, and takes its write-ahead log away with all that it writes."""
    path = tmp_path / "held.db"
    database = open_database(f"sqlite+pysqlite:///{path}")
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE things (id INTEGER)")
    with database.read() as held:
        held.exec_driver_sql("SELECT id FROM things").all()
        with database.read() as another:
            another.exec_driver_sql("SELECT id FROM things").all()
    look = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT id FROM things').fetchall()"
    subprocess.run([sys.executable, "-c", look, path], check=True)
    with database.write() as connection:
        connection.exec_driver_sql("INSERT INTO things VALUES (1)")
    count = (
        "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM things').fetchone()[0])"
    )
    found = subprocess.run([sys.executable, "-c", count, path], check=True, capture_output=True)
    database.close()
    assert found.stdout == b"1\n"


def test_a_new_file_may_be_opened_by_many_at_once(tmp_path: Path) -> None:
    """SQLite refuses some the change to its write-ahead log, without a wait: now and then, so many files are made."""
    connections = 3

    def opened(path: Path, together: threading.Barrier) -> str:
        database = open_database(f"sqlite:///{path}")
        together.wait()
        try:
            with database.read() as connection:
                return str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
        finally:
            database.close()

    with ThreadPoolExecutor(connections) as threads:
        for number in range(100):
            path, together = tmp_path / f"{number}.db", threading.Barrier(connections)
            modes = [threads.submit(opened, path, together) for _ in range(connections)]
            assert [mode.result() for mode in modes] == ["wal"] * connections


def test_a_write_that_raises_leaves_nothing(database: Database) -> None:
    def write_and_fail() -> None:
        with database.write() as connection:
            connection.execute(accounts.insert(), [_account(1)])
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - it is the one above
        write_and_fail()
    assert _count(database) == 0


def test_a_read_changes_nothing(database: Database) -> None:
    with database.read() as connection:
        connection.execute(accounts.insert(), [_account(1)])
    assert _count(database) == 0


def test_readers_go_on_while_a_writer_holds_the_lock(database: Database) -> None:
    with database.write() as connection:
        connection.execute(accounts.insert(), [_account(1)])
        assert _count(database) == 0
    assert _count(database) == 1


def test_a_second_writer_waits_and_then_gives_up(database_url: str) -> None:
    first, second = open_database(database_url), open_database(database_url, busy_timeout_s=0.05)
    with first.write(), pytest.raises(TenancyUnavailable), second.write():
        pass
    with second.write() as connection:
        connection.execute(accounts.insert(), [_account(1)])
    first.close()
    second.close()


def test_writers_that_come_together_take_turns(database: Database) -> None:
    def add(number: int) -> None:
        with database.write() as connection:
            known = connection.scalar(sa.select(sa.func.count()).select_from(accounts)) or 0
            connection.execute(accounts.insert(), [_account(known)])
        assert number >= 0

    threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _count(database) == 8


@over_both_databases
def test_missing_rows_are_added_and_present_ones_left_alone(database: Database) -> None:
    with database.write() as connection:
        assert insert_missing(connection, accounts, [_account(1)]) == 1
        changed = _account(1) | {"name": "changed"}
        assert insert_missing(connection, accounts, [changed, _account(2)]) == 1
        assert insert_missing(connection, accounts, [changed]) == 0
        names = connection.scalars(sa.select(accounts.c.name).order_by(accounts.c.id)).all()
    assert names == ["account 1", "account 2"]


def test_an_empty_batch_asks_nothing(database: Database) -> None:
    with database.write() as connection:
        assert insert_missing(connection, accounts, []) == 0


def test_inserts_of_any_length_have_few_texts_for_drivers_to_keep(database: Database) -> None:
    texts: set[str] = set()

    def note(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        if statement.startswith("INSERT"):
            texts.add(statement)

    sa.event.listen(database.engine, "before_cursor_execute", note)
    expected: set[object] = set()
    number = 0
    for length in range(33):
        rows = [_account(number + index) for index in range(length)]
        number += length
        expected.update(row["id"] for row in rows)
        with database.write() as connection:
            assert insert_missing_ids(connection, accounts, rows) == {row["id"] for row in rows}
    with database.read() as connection:
        assert set(connection.scalars(sa.select(accounts.c.id))) == expected
    assert len(texts) == 6  # of 1, 2, 4 … 32 rows


async def test_calls_run_in_the_databases_own_threads(database: Database) -> None:
    name = await database.call(lambda: threading.current_thread().name)
    assert name.startswith("database")


async def test_what_a_call_raises_passes_through(database: Database) -> None:
    def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await database.call(fail)


async def test_a_mistake_in_a_statement_is_not_called_trouble(database: Database) -> None:
    def insert_twice() -> None:
        with database.write() as connection:
            connection.execute(accounts.insert(), [_account(1), _account(1)])

    with pytest.raises(sa.exc.IntegrityError):
        await database.call(insert_twice)


async def test_a_database_that_can_not_be_opened_is_unavailable_and_the_log_says_why() -> None:
    database = open_database("sqlite:////nonexistent/folder/pagegate.db")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(TenancyUnavailable):
                await database.call(_count, database)
    database.close()
    why = [entry["why"] for entry in logs if entry["event"] == "the database fails"]
    assert why == ["unable to open database file"]


async def test_a_call_that_never_ends_is_given_up(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_CALL_TIMEOUT_S", 0.05)
    release = threading.Event()
    with pytest.raises(TenancyUnavailable):
        await database.call(release.wait)
    release.set()


async def test_the_line_of_waiting_calls_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_CALLS_WAITING_MAX", 3)
    release = threading.Event()
    waiting = [asyncio.create_task(database.call(release.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TenancyUnavailable):
        await database.call(release.wait)
    release.set()
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert await database.call(release.wait) is True


def test_an_in_memory_database_is_refused() -> None:
    with pytest.raises(AssertionError):
        open_database("sqlite://")


def test_a_text_that_can_not_be_held_is_the_callers_fault(postgres: PostgresServer) -> None:
    with postgres.database() as url:
        database = open_database(url)
        with pytest.raises(TextUnstorable), database.read() as connection:
            connection.execute(sa.select(accounts).where(accounts.c.id == "a\0")).first()
        database.close()
