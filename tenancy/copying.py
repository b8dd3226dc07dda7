"""Copies a whole database into an empty one of the same schema, and compares every row before the copy counts.

`pagegate db copy` calls it when one process on SQLite becomes several on PostgreSQL. Knows no table: it asks the source
which there are. Both sides are one transaction: nobody writes to the source meanwhile, and a copy that failed leaves
nothing behind.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import sqlalchemy as sa

from tenancy.database import Database
from tenancy.errors import CopyRefused
from tenancy.migrations import is_current

# The widest table's rows stay below the parameters that a statement may have.
_ROWS_AT_ONCE: Final = 500
# Of tables with contents: a row of a file is a megabyte, one of a batch as much as a request.
_CONTENTS_AT_ONCE: Final = 16
_HISTORY: Final = "alembic_version"


def copy_database(source: Database, target: Database) -> dict[str, int]:
    """How many rows each table has now in the target. Both schemas are at the newest revision.

    Raises CopyRefused if the target has rows, or if what was written is not what was read; TenancyUnavailable.
    """
    for database, name in ((source, "source"), (target, "target")):
        if not is_current(database.engine):
            raise CopyRefused(f"The {name}'s schema is not at the newest revision: run 'pagegate db upgrade'.")
    with source.write() as reading, target.write() as writing:
        tables, there = _tables(reading), {table.name: table for table in _tables(writing)}
        for table in there.values():
            if writing.execute(sa.select(table).limit(1)).first() is not None:
                raise CopyRefused(f"The target is not empty: its table {table.name} has rows.")
        for table in tables:
            _write(reading, writing, table, there[table.name])
        rows = {str(table.name): _compare(reading, writing, table, there[table.name]) for table in tables}
        for table in tables:
            _go_on_counting(reading, writing, table)
        return rows


def _tables(connection: sa.Connection) -> list[sa.Table]:
    """Referred ones first."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != _HISTORY]


def _rows(connection: sa.Connection, table: sa.Table) -> Iterator[Sequence[dict[str, Any]]]:
    large = any(isinstance(column.type, sa.LargeBinary) for column in table.c)
    at_once = _CONTENTS_AT_ONCE if large else _ROWS_AT_ONCE
    found = connection.execute(sa.select(table), execution_options={"yield_per": at_once}).mappings()
    for some in found.partitions():
        yield [dict(row) for row in some]


def _write(reading: sa.Connection, writing: sa.Connection, table: sa.Table, into: sa.Table) -> None:
    """What refers to a row of its own table is told when all of them are there."""
    own = {column.name for column in table.c if any(key.references(table) for key in column.foreign_keys)}
    for rows in _rows(reading, table):
        writing.execute(into.insert(), [row | dict.fromkeys(own) for row in rows])
    if not own:
        return
    keys = [column.name for column in into.primary_key]
    update = into.update().where(*(into.c[name] == sa.bindparam(f"of_{name}") for name in keys))
    update = update.values({name: sa.bindparam(f"new_{name}") for name in own})
    for rows in _rows(reading, table):
        referring = [row for row in rows if any(row[name] is not None for name in own)]
        if referring:
            writing.execute(
                update,
                [
                    {f"of_{name}": row[name] for name in keys} | {f"new_{name}": row[name] for name in own}
                    for row in referring
                ],
            )


def _compare(reading: sa.Connection, writing: sa.Connection, table: sa.Table, with_: sa.Table) -> int:
    """How many rows there are. Each is asked for by its key: two databases need not sort alike."""
    keys = [column.name for column in table.primary_key]
    counted = 0
    for rows in _rows(reading, table):
        wanted = {tuple(row[name] for name in keys): row for row in rows}
        query = sa.select(with_).where(sa.tuple_(*(with_.c[name] for name in keys)).in_(list(wanted)))
        found = [dict(row) for row in writing.execute(query).mappings()]
        if {tuple(row[name] for name in keys): row for row in found} != wanted:
            raise CopyRefused(f"The copy of the table {table.name} differs from the original; nothing was kept.")
        counted += len(rows)
    if writing.scalar(sa.select(sa.func.count()).select_from(with_)) != counted:
        raise CopyRefused(f"The copy of the table {table.name} has rows that the original has not; nothing was kept.")
    return counted


def _go_on_counting(reading: sa.Connection, writing: sa.Connection, table: sa.Table) -> None:
    """A number that SQLite gave once is not given again, though its row be gone."""
    if writing.dialect.name != "postgresql":
        return
    for column in table.primary_key:
        named = sa.func.pg_get_serial_sequence(table.name, column.name)
        sequence = writing.scalar(sa.select(named))
        if sequence is not None:
            last = reading.scalar(sa.select(sa.func.max(column))) or 0
            if reading.dialect.name == "sqlite":
                given = sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name").bindparams(name=table.name)
                last = max(last, reading.scalar(given) or 0)
            if last:
                writing.execute(sa.select(sa.func.setval(sequence, last)))
