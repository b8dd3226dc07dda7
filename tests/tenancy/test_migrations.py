"""The migrated schema is the one the code believes in, and processes that start together take turns."""

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

import billing.tables
import tenancy.tables
from tenancy.database import open_database
from tenancy.migrations import is_current, upgrade_schema

_UPGRADE = """
import sys
from tenancy.database import open_database
from tenancy.migrations import upgrade_schema

print("ready", flush=True)
sys.stdin.readline()
database = open_database(sys.argv[1])
upgrade_schema(database.engine)
database.close()
"""


def _all_tables() -> sa.MetaData:
    together = sa.MetaData()
    for metadata in (tenancy.tables.metadata, billing.tables.metadata):
        for table in metadata.sorted_tables:
            table.to_metadata(together)
    return together


def test_tables_and_migrations_agree(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/new.db")
    upgrade_schema(database.engine)
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, _all_tables()) == []
    database.close()


def test_indexes_and_autoincrement_agree_too(tmp_path: Path) -> None:
    migrated, created = (open_database(f"sqlite:///{tmp_path}/{name}.db") for name in ("migrated", "created"))
    upgrade_schema(migrated.engine)
    for metadata in (tenancy.tables.metadata, billing.tables.metadata):
        with created.write() as connection:
            metadata.create_all(connection)

    def schema(engine: sa.Engine) -> dict[str, str]:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'alembic%'"
        with engine.connect() as connection:
            return {name: " ".join(sql.split()) for name, sql in connection.exec_driver_sql(query)}

    found, wanted = schema(migrated.engine), schema(created.engine)
    assert found.keys() == wanted.keys()
    indexes = [name for name in wanted if name.startswith(("ix_", "ux_"))]
    assert indexes
    assert [found[name] for name in indexes] == [wanted[name] for name in indexes]
    assert "AUTOINCREMENT" in found["prices"]
    migrated.close()
    created.close()


def test_upgrading_again_changes_nothing(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/new.db")
    assert not is_current(database.engine)
    upgrade_schema(database.engine)
    assert is_current(database.engine)
    upgrade_schema(database.engine)
    assert is_current(database.engine)
    database.close()


def test_a_folder_with_a_percent_sign_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "a%20b%(c)s"
    folder.mkdir()
    database = open_database(f"sqlite:///{str(folder).replace('%', '%25')}/new.db")
    upgrade_schema(database.engine)
    assert is_current(database.engine)
    database.close()


@pytest.mark.timeout(60)
def test_processes_that_start_together_all_find_the_schema(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", _UPGRADE, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for start in starts:
        assert start.stdout is not None
        assert start.stdout.readline() == "ready\n"
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("\n")
        start.stdin.flush()
    errors = [start.communicate(timeout=50)[1] for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], errors
    database = open_database(url)
    assert is_current(database.engine)
    database.close()
