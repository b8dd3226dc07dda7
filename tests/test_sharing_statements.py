"""A statement is compiled once, however many databases it is put to, and none of them waits for the disk."""

from pathlib import Path

import sqlalchemy as sa

from tenancy.database import open_database


def test_what_one_database_has_compiled_the_next_one_takes(tmp_path: Path) -> None:
    seen: list[object] = []
    table = sa.Table("pages", sa.MetaData(), sa.Column("held", sa.Integer))
    for name in ("first", "second"):
        database = open_database(f"sqlite:///{tmp_path}/{name}.db")
        with database.write() as connection:
            table.create(connection)
            connection.execute(sa.insert(table), {"held": 3})
        with database.read() as connection:
            result = connection.execute(sa.select(table.c.held))
            seen.append(result.context.compiled)
            assert result.scalar_one() == 3
        database.close()
    assert seen[0] is seen[1]


def test_only_what_names_its_driver_waits_for_the_disk(tmp_path: Path) -> None:
    waits: dict[str, list[object]] = {}
    for kind in ("sqlite", "sqlite+pysqlite"):
        database = open_database(f"{kind}:///{tmp_path}/{kind}.db")
        for read in (database.read, database.read, database.write):
            with read() as connection:
                waits.setdefault(kind, []).append(connection.exec_driver_sql("PRAGMA synchronous").scalar())
        database.close()
    assert waits == {"sqlite": [0, 0, 0], "sqlite+pysqlite": [2, 2, 2]}
