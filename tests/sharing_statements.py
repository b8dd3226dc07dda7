"""Lets all SQLite databases that one process opens share what SQLAlchemy compiles: a test's file is new, its statements
are not.

An engine keeps compiled statements by its own dialect, so with a database for every test each one compiled them all
again: a third of the CPU of what touches the database. conftest.py registers this before anything is opened.
"""

import functools

import sqlalchemy as sa
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

_STATEMENTS_MAX = 5_000
_compiled: LRUCache[object, object] = LRUCache(_STATEMENTS_MAX)


class SharingDialect(SQLiteDialect_pysqlite):
    """SQLAlchemy's own, but for what its engines are given when they are made."""

    supports_statement_cache = True

    @classmethod
    def engine_created(cls, engine: sa.Engine) -> None:
        engine.dialect = _initialised()
        engine.update_execution_options(compiled_cache=_compiled)


@functools.cache
def _initialised() -> sa.Dialect:
    """The one dialect of all, which has seen a connection: what it learns of a driver is the same for every file."""
    engine = sa.create_engine("sqlite+pysqlite://")
    engine.connect().close()
    engine.dispose()
    return engine.dialect


def share_statements() -> None:
    """For URLs that name SQLite and no driver, as all of ours do."""
    registry.register("sqlite", __name__, SharingDialect.__name__)
