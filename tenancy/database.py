"""The SQL database: one engine, read and write transactions, and the threads that may wait for it.

Opened by the composition root and the command line; tenancy's and billing's stores run inside its connections. All that
differs between SQLite and PostgreSQL is here; every other file is one code for both. Knows no table.
"""

import asyncio
import math
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
import structlog
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from tenancy.answering import Answering, Change, Standing
from tenancy.errors import TenancyUnavailable, TextUnstorable
from tenancy.hung_calls import OpenConnections

log = structlog.get_logger(__name__)

T = TypeVar("T")

_THREADS = 4  # SQLite has one writer and readers are short: more threads would only wait for each other
_CALLS_WAITING_MAX = 1_000
_CALL_TIMEOUT_S = 15.0  # above the busy timeout, so that the database's own error is the usual one
_STATEMENT_TIMEOUT_S = 10.0
_LAST_CALLS_S = 5.0  # what runs when the database is closed has this long to end well
_SLOW_S = 1.0  # for what takes longer the database is probed, although it may still end well
_PROBE_S = 1.5  # one that takes longer has found that nobody is answered
_PROBE_INTERVAL_S = 0.25
_CHANGE_AGAIN_S = 0.005  # between two tries to change a new file to its write-ahead log
_WORDS_AGAIN_S = 60.0  # what a driver says of its trouble is logged so often at most
_WORDS_KEPT_MAX = 100
_PRIMARY_CODE = 0xFF  # of SQLite's extended error codes, the part that names the kind
_WRITE_OPTION = "pagegate_write"
_DEED = "pagegate_deed"
_ROWS_MAX = 256  # of one statement; 256 rows of the widest table are within what SQLite lets one bind
# For whom a transaction works, as row-level security (walls.py) asks: an account's id, or every account.
ACCOUNT_SETTING = "pagegate.account"
EVERY_ACCOUNT = "*"
_ACTING_FOR: ContextVar[str] = ContextVar("for whom transactions work", default=EVERY_ACCOUNT)
_ONE_PASSES_LOCK = 0x7067_6D69  # an arbitrary, fixed number: "pgmi"

# What the caller did wrong, and no trouble of the database.
_CALLER_ERRORS = (exc.IntegrityError, exc.ProgrammingError, exc.DataError, exc.NotSupportedError)


class Database:
    """An engine, and a small pool of threads of its own in which synchronous queries run.

    While probes find that it does not answer, calls are refused at once: nobody waits for what hangs.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        # SQLite's own busy timeout ends each of its calls.
        self._connections = OpenConnections(engine) if engine.dialect.name == "postgresql" else None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="database")
        self._waiting = 0
        self._answering = Answering()
        self._running: set[asyncio.Timeout] = set()
        self._loop: asyncio.AbstractEventLoop | None = None  # in which calls are made
        self._words_at: dict[str, float] = {}  # of the driver: when they were logged
        self._probing: asyncio.Task[None] | None = None
        # Apart, so that calls that are stuck don't hold it up.
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="database probe")
        # Called in the deed's thread once a transaction with an entry in the audit log is committed.
        self.after_deed: Callable[[], object] = lambda: None

    @property
    def away(self) -> bool:
        """The newest probe was not answered."""
        return self._answering.standing is Standing.AWAY

    def read(self) -> AbstractContextManager[sa.Connection]:
        """A connection for queries alone: it takes no write lock, and whatever it did is rolled back."""
        return self._noticed(begin_read(self.engine))

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One write transaction: committed at the end of the block, rolled back if it raises."""
        with self._noticed(begin_write(self.engine)) as connection:
            connection.info.pop(_DEED, None)  # of one that was rolled back
            yield connection
            logged = connection.info.pop(_DEED, False)
        if logged:
            self.after_deed()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a synchronous function in a database thread.

        Raises what the function raises, and TenancyUnavailable if it does not end in time, or if the database is found
        to be away: it then runs on unheard, so writes must bear being repeated.
        """
        if self.away:
            raise _unavailable()
        if self._waiting >= _CALLS_WAITING_MAX:
            raise TenancyUnavailable("Too many calls are waiting for the database.", retry_after_s=1)
        self._waiting += 1
        self._loop = loop = asyncio.get_running_loop()
        slow = loop.call_later(_SLOW_S, self._doubt)
        bound = asyncio.timeout(_CALL_TIMEOUT_S)
        try:
            run = copy_context().run  # for whom the caller acts
            call = loop.run_in_executor(self._threads, partial(run, function, *args))
            async with bound:
                self._running.add(bound)
                return await call
        except TimeoutError as error:
            raise _unavailable() from error
        finally:
            self._running.discard(bound)
            slow.cancel()
            self._waiting -= 1

    @contextmanager
    def _noticed(self, transaction: AbstractContextManager[sa.Connection]) -> Iterator[sa.Connection]:
        try:
            with transaction as connection:
                yield connection
        except TenancyUnavailable as error:
            # Without a loop there is nobody to tell: the command line's one call has failed, and that is all.
            if self._loop is not None and not self._loop.is_closed():
                self._log_words(error)
                self._loop.call_soon_threadsafe(self._doubt)
            raise

    def _log_words(self, error: TenancyUnavailable) -> None:
        """Clients are told that it does not answer; an operator has to know whether it is full, damaged or gone."""
        words, now = drivers_words(error), time.monotonic()
        if words is None or now - self._words_at.get(words, -math.inf) < _WORDS_AGAIN_S:
            return
        if len(self._words_at) >= _WORDS_KEPT_MAX:
            self._words_at.clear()
        self._words_at[words] = now
        log.warning("the database fails", why=words)

    def _doubt(self) -> None:
        if self._answering.doubt():
            self._probing = asyncio.get_running_loop().create_task(self._probe(), name="probe the database")

    async def _probe(self) -> None:
        """Ask until it answers. A question that hangs is the only one: it is answered when the others are."""
        loop = asyncio.get_running_loop()
        while self._answering.standing is not Standing.ANSWERS:
            self._answering.asked()
            question = loop.run_in_executor(self._prober, self._is_answered)
            await asyncio.wait({question}, timeout=_PROBE_S)
            if not question.done():
                self._conclude(answered=False)
            answered = await question
            self._conclude(answered=answered)
            if not answered:
                await asyncio.sleep(_PROBE_INTERVAL_S)

    def _is_answered(self) -> bool:
        # On SQLite nothing less reads the file.
        question = "PRAGMA schema_version" if self.engine.dialect.name == "sqlite" else "SELECT 1"
        try:
            with begin_read(self.engine) as connection:
                connection.exec_driver_sql(question)
        except TenancyUnavailable:
            return False
        return True

    def _conclude(self, *, answered: bool) -> None:
        change = self._answering.found(answered=answered)
        if change is Change.WENT:
            log.warning("the database does not answer")
            now = asyncio.get_running_loop().time()
            for bound in self._running:
                if not bound.expired():
                    bound.reschedule(now)
        elif change is Change.CAME_BACK:
            log.info("the database answers again")

    def close(self) -> None:
        """Wait for the running calls, then close every connection. What PostgreSQL has not answered by the bound fails:
        a write may have been made then.
        """
        if self._probing is not None and not self._probing.get_loop().is_closed():
            self._probing.cancel()
        with self._connections.cut_after(_LAST_CALLS_S) if self._connections else nullcontext():
            for threads in (self._threads, self._prober):
                threads.shutdown(wait=True, cancel_futures=True)
        self.engine.dispose()


def note_deed(connection: sa.Connection) -> None:
    """The transaction has an entry in the audit log: `after_deed` follows its commit."""
    connection.info[_DEED] = True


@contextmanager
def acting_for(account_id: str) -> Iterator[None]:
    """Every transaction that begins inside works for one account, or for EVERY_ACCOUNT: walled databases heed it."""
    before = _ACTING_FOR.set(account_id)
    try:
        yield
    finally:
        _ACTING_FOR.reset(before)


def act_for_alone(account_id: str) -> None:
    """As acting_for, to the end of the running task: of a request whose bearer is known."""
    _ACTING_FOR.set(account_id)


@contextmanager
def beyond_the_wall(connection: sa.Connection) -> Iterator[None]:
    """Inside, the running transaction sees every account's rows: for what one account's deed has to know of all."""
    _say_for_whom(connection, EVERY_ACCOUNT)
    yield
    _say_for_whom(connection, _ACTING_FOR.get())  # what fails inside ends the transaction, and this with it


def _say_for_whom(connection: sa.Connection, account_id: str) -> None:
    if connection.dialect.name == "postgresql" and _ACTING_FOR.get() != EVERY_ACCOUNT:
        connection.execute(sa.select(sa.func.set_config(ACCOUNT_SETTING, account_id, True)))


def drivers_words(error: BaseException) -> str | None:
    """What the driver said of the trouble behind an error of ours, in one line; None if it said nothing. They name the
    server or the file, and never a password or what a statement was about: what a row breaks is none of its troubles.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, sa.exc.IntegrityError):
            return None
        words = " ".join(str(getattr(cause, "orig", None) or "").split())
        if words:
            return words
        cause = cause.__cause__
    return None


def _unavailable() -> TenancyUnavailable:
    return TenancyUnavailable("The database does not answer. Try again in a moment.", retry_after_s=1)


def open_database(url: str, *, busy_timeout_s: float = 5) -> Database:
    """Open the database at `url` (`sqlite:////path/file.db` or `postgresql+psycopg://…`). Connects on first use."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return Database(_postgresql_engine(parsed, busy_timeout_s))
    assert parsed.database not in (None, "", ":memory:"), "a SQLite database needs a file: threads share it"
    engine = sa.create_engine(
        parsed,
        connect_args={"timeout": busy_timeout_s},
        pool_size=_THREADS,
        max_overflow=_THREADS + 1,  # for a probe
        pool_timeout=busy_timeout_s,
    )
    event.listen(engine, "do_connect", partial(_make_private, parsed.database))
    event.listen(engine, "connect", partial(_prepare_sqlite, busy_timeout_s=busy_timeout_s))
    event.listen(engine, "begin", _begin_sqlite)
    return Database(engine)


def _postgresql_engine(url: sa.URL, busy_timeout_s: float) -> sa.Engine:
    """Every wait has a bound here as well: for a connection, for another's lock, for a statement."""
    waits = {"lock_timeout": busy_timeout_s, "statement_timeout": _STATEMENT_TIMEOUT_S}
    options = " ".join(f"-c {name}={round(seconds * 1_000)}" for name, seconds in waits.items())
    options += f" -c {ACCOUNT_SETTING}={EVERY_ACCOUNT}"
    return sa.create_engine(
        url,
        connect_args={
            "connect_timeout": max(2, round(busy_timeout_s)),
            "options": options,
            # A server that vanished from the network is noticed before a call is given up.
            "tcp_user_timeout": round(_STATEMENT_TIMEOUT_S * 1_000),
        },
        pool_size=_THREADS,
        max_overflow=_THREADS + 1,  # for a probe
        pool_timeout=busy_timeout_s,
        pool_pre_ping=True,
    )


@contextmanager
def begin_read(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction that only reads. Raises TenancyUnavailable if the database does not answer."""
    with _trouble_named(), engine.connect() as connection:
        _say_for_whom(connection, _ACTING_FOR.get())
        yield connection


@contextmanager
def begin_write(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A write transaction. On SQLite it takes the one write lock at once, so that it can't fail for it half-way.

    Raises TenancyUnavailable if the database does not answer, and has changed nothing then.
    """
    with _trouble_named(), engine.execution_options(**{_WRITE_OPTION: True}).begin() as connection:
        _say_for_whom(connection, _ACTING_FOR.get())
        yield connection


@contextmanager
def _trouble_named() -> Iterator[None]:
    try:
        yield
    except (exc.DatabaseError, exc.InterfaceError, exc.TimeoutError) as error:
        if isinstance(error, exc.DataError) and "NUL" in str(error.orig):
            raise TextUnstorable("A text in this request has a NUL character.") from None
        if isinstance(error, _CALLER_ERRORS):
            raise
        raise _unavailable() from error


def let_one_pass(connection: sa.Connection) -> None:
    """Let one process at a time past this point, until its transaction ends. On SQLite the write lock does so.

    For migrations and first starts: what follows may take longer than an ordinary statement.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        connection.execute(sa.text("SET LOCAL lock_timeout = 0"))
        lock_alone(connection, _ONE_PASSES_LOCK)


def lock_alone(connection: sa.Connection, name: int) -> None:
    """Hold the lock of this number until the transaction ends; waits for everyone else who holds it.

    On SQLite a write transaction is alone anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(name)))


def lock_beside_others(connection: sa.Connection, name: int) -> None:
    """Hold the lock of this number until the transaction ends, beside others who do so; lock_alone waits for all."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock_shared(name)))


def take_turn(connection: sa.Connection, number: int) -> None:
    """Hold others that ask for the same number until this transaction ends. On SQLite the write lock does so."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(number)))


def insert_missing_ids(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> set[Any]:
    """As insert_missing; returns the ids of the new ones, whoever else inserts at the same time."""
    statement = _insert(connection, table).on_conflict_do_nothing().returning(table.c.id)
    return {new for some in _by_powers_of_two(rows) for new in connection.scalars(statement, some)}


def insert_missing(connection: sa.Connection, table: sa.Table, rows: list[dict[str, Any]]) -> int:
    """Insert the rows whose primary key is not there yet, leave the others as they are; returns how many are new."""
    if not rows:
        return 0
    # Drivers are not asked how many rows an INSERT has made unless one says so; PostgreSQL's then answers -1.
    counted = {"preserve_rowcount": True}
    return connection.execute(
        _insert(connection, table).on_conflict_do_nothing(), rows, execution_options=counted
    ).rowcount


def _by_powers_of_two(rows: list[T]) -> Iterator[list[T]]:
    """The rows in their order, in pieces of 2^n each, largest first.

    A piece is one statement whose text has all its rows. Drivers keep statements by their texts, with the values that
    were bound last: with a text for every number of rows they would keep hundreds of them, 100 KB and more each.
    """
    taken = 0
    while taken < len(rows):
        length = min(_ROWS_MAX, 1 << ((len(rows) - taken).bit_length() - 1))
        yield rows[taken : taken + length]
        taken += length


def _insert(connection: sa.Connection, table: sa.Table) -> "sqlite.Insert | postgresql.Insert":
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def _make_private(path: str, *_: object) -> None:
    """A new file is for its owner alone, whatever the folder is: it will hold prompts and answers. SQLite gives those
    beside it the same mode. One that is there keeps its own.

    It is made under another name, and one that is there is never opened: a process that closes a file loses all its
    locks on it, those of its other connections too (https://sqlite.org/howtocorrupt.html, 2.2).
    """
    file = Path(path)
    if file.exists():
        return
    with suppress(OSError):  # SQLite says it better
        descriptor, made = tempfile.mkstemp(dir=file.parent, prefix=f"{file.name}.")
        os.close(descriptor)
        try:
            file.hardlink_to(made)
        finally:
            Path(made).unlink()


def _prepare_sqlite(connection: Any, _record: object, *, busy_timeout_s: float) -> None:
    # The driver would begin transactions by itself, late and without the write lock: _begin_sqlite does it instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    try:
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_s * 1000)}")
        _change_to_write_ahead_log(cursor, busy_timeout_s)
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
    finally:
        cursor.close()


def _change_to_write_ahead_log(cursor: sqlite3.Cursor, within_s: float) -> None:
    """A new file is changed once, under a lock for which SQLite does not wait: whoever opens it at the same time tries
    again.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY_CODE != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(_CHANGE_AGAIN_S)
        else:
            return


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITE_OPTION, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
