"""Rows for every table that a database has, whatever its schema: made from what the database says of its columns."""

from typing import Any

import sqlalchemy as sa


def every_table(connection: sa.Connection) -> list[sa.Table]:
    """But for alembic's own; referred ones first."""
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def fill_every_table(connection: sa.Connection, rows: int) -> dict[str, int]:
    """The same number of rows in each; a row refers to that of its number, or, in its own table, the one before."""
    tables = every_table(connection)
    fill(connection, tables, range(rows))
    return {table.name: rows for table in tables}


def fill(connection: sa.Connection, tables: list[sa.Table], numbers: range) -> None:
    """As fill_every_table, in statements that name the columns that these tables know of, and no others."""
    for table in tables:
        connection.execute(table.insert(), [_row(table, number) for number in numbers])


def _row(table: sa.Table, number: int) -> dict[str, Any]:
    return {column.name: _value(column, number) for column in table.c}


def _value(column: sa.Column[Any], number: int) -> Any:
    for key in column.foreign_keys:
        if key.references(column.table):
            return None if number == 0 else _value(key.column, number - 1)
        return _value(key.column, number)
    match column.type:
        case sa.Boolean():
            return number % 2 == 1
        case sa.JSON():
            return {"number": number}
        case sa.LargeBinary():
            return bytes([number % 256, 0, 255])
        case sa.Integer():
            return number + 1
        case sa.Float():
            return number + 0.5
        case sa.String():
            return f"{number:04}"
    raise AssertionError(f"no value for {column!r}")
