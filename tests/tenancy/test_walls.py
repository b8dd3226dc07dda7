"""Row-level security on a real PostgreSQL: whoever forgets the account sees nothing of others, and history stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from billing.budgets import BudgetPeriod, Budgets
from billing.store import UsageStore
from tenancy import audit_log, provisioning
from tenancy.database import Database, acting_for, open_database
from tenancy.errors import WallRefused
from tenancy.keys import KeyKind
from tenancy.store import TenancyStore
from tenancy.tables import api_keys
from tenancy.walls import APPEND_ONLY, UNWALLED, protect, unprotected
from tests.billing.rows import event_row, post_rows
from tests.stores import PostgresServer
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER
from tests.tenancy.rows_of_everything import every_table, fill_every_table

_ROLE = "pagegate_service"


@dataclass
class World:
    """owner: whose the tables are. service: connected as an ordinary role, as a gateway would be."""

    owner: Database
    service: Database
    bare: sa.Engine


@contextmanager
def walled_database(server: PostgresServer) -> Iterator[str]:
    """The URL of a new database behind its wall, for the service's own role."""
    with server.database() as url:
        owner = open_database(url)
        with owner.write() as connection:
            connection.execute(
                sa.text(f"DO $$ BEGIN CREATE ROLE {_ROLE} LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
            )
            protect(connection, _ROLE)
        owner.close()
        yield sa.make_url(url).set(username=_ROLE).render_as_string(hide_password=False)


@pytest.fixture
def world(postgres: PostgresServer) -> Iterator[World]:
    with walled_database(postgres) as url:
        owner = open_database(sa.make_url(url).set(username="postgres").render_as_string(hide_password=False))
        service = open_database(url)
        bare = sa.create_engine(url)
        yield World(owner, service, bare)
        bare.dispose()
        service.close()
        owner.close()


def _counts(connection: sa.Connection, tables: list[sa.Table]) -> dict[str, int]:
    return {
        table.name: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
        for table in tables
        if table.name not in UNWALLED
    }


def test_a_query_that_forgets_its_account_sees_that_accounts_rows_alone(world: World) -> None:
    with world.owner.write() as connection:
        fill_every_table(connection, 3)
        tables = every_table(connection)
    with world.service.read() as connection:
        assert set(_counts(connection, tables).values()) == {3}
    # Rows of number 1 are account 0001's, or its rows' own.
    with acting_for("0001"), world.service.read() as connection:
        seen = _counts(connection, tables)
    assert set(seen.values()) == {1}, {name: count for name, count in seen.items() if count != 1}
    with acting_for("f" * 32), world.service.read() as connection:
        assert set(_counts(connection, tables).values()) == {0}


def test_a_connection_that_does_not_say_for_whom_it_works_sees_nothing(world: World) -> None:
    with world.owner.write() as connection:
        fill_every_table(connection, 2)
        tables = every_table(connection)
    with world.bare.connect() as connection:
        assert set(_counts(connection, tables).values()) == {0}


def test_nothing_is_changed_of_another_account_and_nothing_written_for_it(world: World) -> None:
    clock = SettableClock()
    mine, other = (provisioning.open_account(world.service, name, clock=clock) for name in ("mine", "other"))
    for account in (mine, other):
        provisioning.issue_key(world.service, PEPPER, account.id, name="k", kind=KeyKind.INFERENCE, clock=clock)
    with acting_for(mine.id), world.service.write() as connection:
        assert connection.execute(api_keys.update().values(disabled=True)).rowcount == 1
    assert not provisioning.list_keys(world.service, other.id)[0].disabled
    forged = {"account_id": other.id, "key_id": "", "model": "", "meter": "concurrency", "limit_amount": 1}
    insert = sa.text(
        "INSERT INTO quotas (account_id, key_id, model, meter, limit_amount) "
        "VALUES (:account_id, :key_id, :model, :meter, :limit_amount)"
    )
    refused = pytest.raises(sa.exc.ProgrammingError, match="row-level security")
    with acting_for(mine.id), refused, world.service.write() as connection:
        connection.execute(insert, forged)


def test_deeds_and_queries_of_an_account_work_behind_the_wall_and_the_audit_chain_stays_whole(world: World) -> None:
    clock = SettableClock()
    mine, other = (provisioning.open_account(world.service, name, clock=clock) for name in ("mine", "other"))
    post_rows(world.service, event_row(id="a", account_id=mine.id), event_row(id="b", account_id=other.id))
    with acting_for(mine.id):
        issued = provisioning.issue_key(world.service, PEPPER, mine.id, name="k", kind=KeyKind.ADMIN, clock=clock)
        budgets = Budgets(world.service, clock=clock)
        assert budgets.add(mine.id, 10**9, BudgetPeriod.TOTAL).spent_nano == 1_010_000
        assert UsageStore(world.service).usage_summary(mine.id, 0, 2**62).totals.requests == 1
        assert UsageStore(world.service).usage_summary(other.id, 0, 2**62).totals.requests == 0
        provisioning.revoke_key(world.service, mine.id, issued.key.id, clock=clock)
        with world.service.read() as connection:
            assert len(TenancyStore(connection).accounts()) == 1
    assert audit_log.verify(world.service).broken == ()
    assert {entry.account_id for entry in audit_log.read_audit_log(world.service, None)} == {mine.id, other.id}


@pytest.mark.parametrize("table", APPEND_ONLY)
@pytest.mark.parametrize("deed", ["UPDATE {} SET {} = {}", "DELETE FROM {}", "TRUNCATE {}"])
def test_the_services_role_can_not_alter_what_is_booked_or_logged(world: World, table: str, deed: str) -> None:
    column = {"audit_log": "subject", "ledger_entries": "amount_nano", "ledger_transactions": "memo"}[table]
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied"), world.service.write() as connection:
        connection.execute(sa.text(deed.format(table, column, column)))


def test_a_wall_that_is_missing_is_noticed(world: World) -> None:
    with world.service.read() as connection:
        assert unprotected(connection) == []
    with world.owner.write() as connection:
        assert [text for text in unprotected(connection) if "above row-level security" in text]
        connection.execute(sa.text("ALTER TABLE invoices DISABLE ROW LEVEL SECURITY"))
    with world.service.read() as connection:
        assert unprotected(connection) == ["the table invoices has no wall: run 'pagegate db protect'"]


def test_a_table_that_nobody_spoke_of_is_not_walled_by_guess(world: World, database: Database) -> None:
    with world.owner.write() as connection:
        connection.execute(sa.text("CREATE TABLE news (id INTEGER PRIMARY KEY)"))
    with pytest.raises(WallRefused, match="news"), world.owner.write() as connection:
        protect(connection)
    with pytest.raises(WallRefused, match="SQLite"), database.write() as connection:
        protect(connection)
    with pytest.raises(WallRefused, match="role"), world.owner.write() as connection:
        protect(connection, "x; DROP TABLE accounts")
