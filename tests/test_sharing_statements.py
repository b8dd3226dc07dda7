"""A statement is compiled once, however many databases it is put to."""

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
