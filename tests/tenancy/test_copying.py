"""A database is copied whole or not at all, every row compared, and goes on counting where it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tenancy.copying import _rows, copy_database
from tenancy.database import Database, open_database
from tenancy.errors import CopyRefused
from tests.stores import PostgresServer
from tests.tenancy.rows_of_everything import every_table, fill_every_table


@pytest.fixture
def target(postgres: PostgresServer) -> Iterator[Database]:
    with postgres.database() as url:
        database = open_database(url)
        yield database
        database.close()


def _empty(database: Database) -> bool:
    with database.read() as connection:
        return not any(connection.execute(sa.select(table)).first() for table in every_table(connection))


def test_every_row_of_every_table_is_there_and_numbers_go_on(database: Database, target: Database) -> None:
    with database.write() as connection:
        wanted = fill_every_table(connection, 1_050)  # more than are read at once, twice
        connection.execute(sa.text("DELETE FROM prices WHERE version = 1050"))
    assert copy_database(database, target) == wanted | {"prices": 1_049}
    with target.write() as connection:
        prices = next(table for table in every_table(connection) if table.name == "prices")
        row = dict(connection.execute(sa.select(prices).limit(1)).mappings().one())
        del row["version"]
        # 1,050 was given once, though its row is gone.
        assert connection.execute(prices.insert().returning(prices.c.version), row | {"model": "new"}).scalar() == 1_051
    assert copy_of_copy_is_refused(database, target)


def copy_of_copy_is_refused(database: Database, target: Database) -> bool:
    with pytest.raises(CopyRefused, match="not empty"):
        copy_database(database, target)
    return True


def test_what_was_not_written_as_it_was_read_is_noticed_and_nothing_stays(database: Database, target: Database) -> None:
    with database.write() as connection:
        fill_every_table(connection, 3)
    with target.write() as connection:
        connection.execute(
            sa.text(
                "CREATE FUNCTION forge() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN IF NEW.amount_nano = 2 THEN NEW.amount_nano = 20; END IF; RETURN NEW; END $$"
            )
        )
        connection.execute(
            sa.text("CREATE TRIGGER forge BEFORE INSERT ON ledger_entries FOR EACH ROW EXECUTE FUNCTION forge()")
        )
    with pytest.raises(CopyRefused, match="ledger_entries differs"):
        copy_database(database, target)
    assert _empty(target)


def test_few_rows_of_contents_are_in_memory_at_once(database: Database) -> None:
    with database.write() as connection:
        fill_every_table(connection, 40)
        (parts,) = (table for table in every_table(connection) if table.name == "file_parts")
        assert max(len(rows) for rows in _rows(connection, parts)) <= 16


def test_another_schema_is_refused(database: Database, postgres: PostgresServer, tmp_path: Path) -> None:
    with postgres.database(migrated=False) as url:
        bare = open_database(url)
        with pytest.raises(CopyRefused, match="target's schema"):
            copy_database(database, bare)
        bare.close()
    bare = open_database(f"sqlite:///{tmp_path}/bare.db")
    with pytest.raises(CopyRefused, match="source's schema"):
        copy_database(bare, database)
    bare.close()
