"""Any history of requests, deeds, kills and failing databases leaves a ledger that agrees with what happened.

On SQLite and, fewer, on PostgreSQL, whose connections are cut in the middle of transactions.
"""

import asyncio
import os
import shutil
import socket
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from billing.audit import violations
from billing.errors import BillingUnavailable, IdempotencyMismatch, LedgerConflict, TransactionNotFound
from billing.ledger.payers import AccountMode
from billing.ledger.wallet import Wallets
from billing.metering import Metering
from billing.price_book import PriceBook, set_price
from billing.rating import rate
from billing.rollups import DAY_NS
from billing.spool import Spool
from billing.tables import usage_events
from billing.usage import TokenUsage
from tenancy.answering import Standing
from tenancy.database import open_database
from tenancy.errors import TenancyUnavailable
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT, facts, price, record
from tests.examples import examples, time_for
from tests.stores import PostgresServer
from tests.tenancy.clock import SettableClock

accounts = st.sampled_from([ACCOUNT, OTHER_ACCOUNT])
tokens = st.integers(0, 50)


@contextmanager
def _failing(engine: sa.Engine, statement: int) -> Iterator[None]:
    """The database goes away at the given statement, or commit, of whatever runs."""
    seen = 0

    def fail(connection: sa.Connection, *_args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > statement:
            _cut(connection)

    for kind in ("before_cursor_execute", "commit"):
        sa.event.listen(engine, kind, fail)
    try:
        yield
    finally:
        for kind in ("before_cursor_execute", "commit"):
            sa.event.remove(engine, kind, fail)


def _cut(connection: sa.Connection) -> None:
    if connection.dialect.name == "sqlite":
        raise sa.exc.OperationalError("", {}, sqlite3.OperationalError("disk I/O error"))
    driver: Any = connection.connection.dbapi_connection
    with socket.socket(fileno=os.dup(driver.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)  # what comes next fails in the driver, and the server rolls back


@contextmanager
def _unheard(engine: sa.Engine) -> Iterator[None]:
    """What is committed is committed, and whoever did so is told that the database is gone."""
    dialect: Any = engine.dialect
    commit = dialect.do_commit

    def commit_unheard(driver: object) -> None:
        commit(driver)
        raise dialect.loaded_dbapi.OperationalError("the connection is lost")

    dialect.do_commit = commit_unheard
    try:
        yield
    finally:
        dialect.do_commit = commit


class History(RuleBasedStateMachine):
    """costs, given: what must come out, by request and by deed, figured apart from the code under test.

    new_database: of the URL of a migrated database, which may lie in the folder.
    """

    new_database: Callable[[Path], AbstractContextManager[str]]

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="history"))
        self.closing = ExitStack()
        self.closing.callback(shutil.rmtree, self.folder)
        url = self.closing.enter_context(self.new_database(self.folder))
        self.clock = SettableClock()
        self.runner = asyncio.Runner()
        self.database = open_database(url)
        with self.database.write() as connection:
            set_price(connection, price())
        self.book = PriceBook(self.database)
        self.runner.run(self.book.refresh())
        self.wallets = Wallets(self.database, clock=self.clock)
        self.spool: Spool | None = None
        self.open_it()
        self.number = 0
        self.costs: dict[str, tuple[str, int]] = {}
        self.running: dict[str, tuple[str, int]] = {}
        self.given: dict[str, tuple[str, int]] = {}
        self.taken_back: set[str] = set()

    def open_it(self) -> None:
        if self.spool is not None:
            self.spool.close()
        self.spool = Spool(self.folder / "spool")
        self.metering = Metering(self.spool, self.database, self.book, clock=self.clock, drain_batch_records_max=3)
        self.runner.run(self._answered())
        self.runner.run(self.metering.recover())

    @rule(account=accounts, produced=tokens)
    def a_request_finishes(self, account: str, produced: int) -> None:
        self.number += 1
        name = f"r{self.number}"
        usage = TokenUsage(10, 0, produced, 0)
        ended = record(name, usage, account_id=account, started_at_ns=self.clock())
        self.metering.begin(ended.facts)
        charge = self.runner.run(self.metering.finish(ended, price()))
        self.costs[name] = (account, charge.cost_nano)

    @rule(account=accounts, produced=tokens)
    def a_request_runs_on(self, account: str, produced: int) -> None:
        self.number += 1
        name = f"r{self.number}"
        self.metering.begin(facts(name, account_id=account, started_at_ns=self.clock()))
        usage = TokenUsage(10, 0, produced, 0)
        self.metering.progress(name, usage)
        self.running[name] = (account, rate(usage, price()).cost_nano)

    def _doubted(self) -> bool:
        return self.database._answering.standing is not Standing.ANSWERS

    async def _answered(self) -> None:
        """Until a probe has found that the database answers again; a probe runs only while the loop does."""
        async with asyncio.timeout(30):
            await asyncio.sleep(0.001)  # what was in trouble outside of the loop is heard of
            while self._doubted():  # noqa: ASYNC110 - it is only asked
                await asyncio.sleep(0.01)

    @rule()
    def some_are_posted(self) -> None:
        self.runner.run(self._answered())
        self.runner.run(self.metering.drain_once())

    @rule(statement=st.integers(0, 12))
    def the_database_fails_while_some_are_posted(self, statement: int) -> None:
        with _failing(self.database.engine, statement), suppress(BillingUnavailable):
            self.runner.run(self.metering.drain_once())

    @rule()
    def some_are_posted_and_nobody_hears_of_it(self) -> None:
        with _unheard(self.database.engine), suppress(BillingUnavailable):
            self.runner.run(self.metering.drain_once())

    @rule(forgets=st.booleans())
    def the_gateway_dies_and_starts_again(self, forgets: bool) -> None:  # noqa: FBT001 - drawn
        if forgets:
            (self.folder / "spool" / "checkpoint").unlink(missing_ok=True)
        self.costs |= self.running
        self.running = {}
        self.open_it()

    @rule(account=accounts, amount=st.integers(1, 3), key=st.integers(0, 3))
    def money_comes_in(self, account: str, amount: int, key: int) -> None:
        try:
            booked = self.wallets.top_up(account, amount * 100_000, idempotency_key=f"k{key}")
        except IdempotencyMismatch:
            assert self.given[f"top-up:{account}:k{key}"][1] != amount * 100_000
        else:
            assert booked.replayed is (booked.source in self.given)
            self.given[booked.source] = (account, amount * 100_000)

    @rule(account=accounts, amount=st.integers(1, 3), key=st.integers(0, 3))
    def money_comes_in_and_is_sent_again_since_nobody_heard(self, account: str, amount: int, key: int) -> None:
        try:
            with _unheard(self.database.engine), suppress(TenancyUnavailable):
                self.wallets.top_up(account, amount * 100_000, idempotency_key=f"k{key}")
            booked = self.wallets.top_up(account, amount * 100_000, idempotency_key=f"k{key}")
        except IdempotencyMismatch:
            assert self.given[f"top-up:{account}:k{key}"][1] != amount * 100_000
        else:
            assert booked.replayed
            self.given[booked.source] = (account, amount * 100_000)

    @rule(account=accounts, key=st.integers(0, 3), days=st.none() | st.integers(1, 3))
    def money_is_given(self, account: str, key: int, days: int | None) -> None:
        source = f"grant:{account}:g{key}"
        expiry = None if days is None else self.clock() + days * DAY_NS
        if source not in self.given:
            self.wallets.grant(account, 250_000, idempotency_key=f"g{key}", priority=key % 2, expires_at_ns=expiry)
            self.given[source] = (account, 250_000)

    @rule(account=accounts, mode=st.sampled_from(AccountMode))
    def an_account_pays_otherwise(self, account: str, mode: AccountMode) -> None:
        self.wallets.set_mode(account, mode)

    @precondition(lambda self: self.costs or self.given)
    @rule(data=st.data(), account=accounts)
    def something_is_taken_back(self, data: st.DataObject, account: str) -> None:
        known = sorted([f"usage:{name}" for name in self.costs] + list(self.given))
        source = data.draw(st.sampled_from(known))
        try:
            booked = self.wallets.reverse(account, source)
        except (TransactionNotFound, LedgerConflict):
            return
        assert booked.replayed is (source in self.taken_back)
        self.taken_back.add(source)

    @rule(days=st.integers(0, 3))
    def days_pass(self, days: int) -> None:
        self.clock.now_ns += days * DAY_NS
        self.wallets.expire_due()

    @invariant()
    def nothing_contradicts(self) -> None:
        assert violations(self.database) == []

    def teardown(self) -> None:
        if not hasattr(self, "metering"):
            return
        self.the_gateway_dies_and_starts_again(forgets=False)
        self.runner.run(self._answered())
        self.runner.run(self.metering.flush())
        self.nothing_contradicts()
        self.everything_is_there()
        assert self.spool is not None
        self.spool.close()
        self.database.close()
        self.runner.close()
        self.closing.close()

    def everything_is_there(self) -> None:
        with self.database.read() as connection:
            rows = connection.execute(sa.select(usage_events)).mappings().all()
            expired = connection.execute(
                sa.text(
                    "SELECT t.account_id, SUM(e.amount_nano) FROM ledger_entries e JOIN ledger_transactions t"
                    " ON t.source = e.source WHERE e.ledger_account_id = 'breakage' GROUP BY t.account_id"
                )
            ).all()
        assert {row["id"]: (row["account_id"], row["cost_nano"]) for row in rows} == self.costs
        for account in (ACCOUNT, OTHER_ACCOUNT):
            view = self.wallets.show(account)
            has = view.wallet_nano + sum(grant.left_nano for grant in view.grants) - view.owed_nano
            moved = {f"usage:{name}": (owner, -cost) for name, (owner, cost) in self.costs.items()} | self.given
            came = sum(
                nano for source, (owner, nano) in moved.items() if owner == account and source not in self.taken_back
            )
            assert has == came - sum(nano for owner, nano in expired if owner == account)


@pytest.mark.timeout(time_for(300))
@pytest.mark.parametrize("count", [3, pytest.param(40, marks=[pytest.mark.load, pytest.mark.search])])
def test_any_history_agrees_with_what_happened(migrated_file: Path, count: int) -> None:
    @contextmanager
    def new_database(folder: Path) -> Iterator[str]:
        shutil.copy(migrated_file, folder / "pagegate.db")
        yield f"sqlite:///{folder}/pagegate.db"

    _judge(new_database, examples(count))


@pytest.mark.timeout(120)
def test_any_history_on_postgresql_agrees_with_what_happened(postgres: PostgresServer) -> None:
    _judge(lambda _folder: postgres.database(), 3)


def _judge(new_database: Callable[[Path], AbstractContextManager[str]], count: int) -> None:
    machine = type("HistoryOf", (History,), {"new_database": staticmethod(new_database)})
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=25, deadline=None))
