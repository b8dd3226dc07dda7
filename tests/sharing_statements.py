"""What all SQLite databases that one process of the tests opens have in common: a test's file is new, its statements
are not, and nothing in it outlives the test, so it does not wait for the disk (as the tests' PostgreSQL doesn't).

An engine keeps compiled statements by its own dialect, so with a database for every test each one compiled them all
again: a third of the CPU of what touches the database. conftest.py registers this before anything is opened. A URL that
names the driver (`sqlite+pysqlite:`) opens a database as the service has it.
"""

import functools
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
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
        event.listen(engine, "connect", _do_not_wait)
        event.listen(engine, "checkout", _still_do_not_wait)


def _do_not_wait(driver: Any, _record: object) -> None:
    """Before tenancy/database.py says anything of a connection: its change to a write-ahead log would wait."""
    driver.execute("PRAGMA synchronous = OFF")


def _still_do_not_wait(driver: Any, record: Any, _proxy: object) -> None:
    """At the first use of a connection: what tenancy/database.py says of it is said by then."""
    if not record.info.setdefault(_still_do_not_wait, False):
        _do_not_wait(driver, record)
        record.info[_still_do_not_wait] = True


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
