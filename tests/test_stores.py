"""Databases of PostgreSQL that tests are given: whoever comes next finds nothing of those before."""

import time

import psycopg
import pytest

from tenancy import provisioning
from tenancy.database import open_database
from tests.stores import PostgresServer


def _connection(url: str) -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(url.replace("+psycopg", ""), autocommit=True)


def _contents(url: str) -> dict[str, list[tuple[object, ...]]]:
    with _connection(url) as connection:
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        counters = connection.execute("SELECT sequencename, last_value FROM pg_sequences ORDER BY 1").fetchall()
        rows = {str(name): connection.execute(f'SELECT * FROM "{name}"'.encode()).fetchall() for (name,) in tables}
        return rows | {"sequences": counters}


def test_one_that_was_used_is_given_again_as_if_it_were_new(postgres: PostgresServer) -> None:
    with postgres.database() as used:
        database = open_database(used)
        provisioning.open_account(database, "before", clock=time.time_ns)
        database.close()
        left_open = _connection(used)
        left_open.execute("UPDATE alembic_version SET version_num = 'another'")
        for (name,) in left_open.execute("SELECT quote_ident(sequencename) FROM pg_sequences").fetchall():
            left_open.execute(f"SELECT nextval('{name}')".encode())
    left_open.close()
    with postgres.database() as again, postgres.database() as other:
        assert again == used != other
        assert _contents(again) == _contents(other)


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE accounts ADD COLUMN more INTEGER",
        "ALTER TABLE accounts RENAME TO tenants",
        "CREATE TABLE more (id INTEGER PRIMARY KEY)",
        "CREATE INDEX more ON accounts (name)",
        "ALTER TABLE invoices ENABLE ROW LEVEL SECURITY",
        "CREATE FUNCTION more() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "GRANT SELECT ON accounts TO PUBLIC",
        "CREATE SCHEMA more",
    ],
)
def test_one_that_was_changed_is_given_to_nobody(postgres: PostgresServer, change: str) -> None:
    with postgres.database() as changed, _connection(changed) as connection:
        connection.execute(change.encode())
    with postgres.database() as first, postgres.database() as second:
        assert changed not in {first, second}
