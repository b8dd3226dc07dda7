"""The migrated schema is the one the code believes in, and processes that start together take turns."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

import billing.tables
import gateway.batches.tables
import gateway.conversations
import gateway.lifecycle.tables
import gateway.rollouts.tables
import tenancy.tables
from billing.budgets import read_budgets
from tenancy.database import open_database
from tenancy.migrations import SCRIPT_LOCATION, _config, is_current, newest_revision, revision_of, upgrade_schema
from tenancy.quotas import Plan
from tenancy.store import TenancyStore
from tests.stores import PostgresServer
from tests.tenancy.conftest import POSTGRESQL, SQLITE
from tests.tenancy.rows_of_everything import every_table, fill, fill_every_table

_UPGRADE = """
import sys
from tenancy.database import open_database
from tenancy.migrations import upgrade_schema

print("ready", flush=True)
sys.stdin.readline()
database = open_database(sys.argv[1])
upgrade_schema(database.engine)
database.close()
"""


_METADATA = (
    tenancy.tables.metadata,
    billing.tables.metadata,
    gateway.batches.tables.metadata,
    gateway.conversations.metadata,
    gateway.lifecycle.tables.metadata,
    gateway.rollouts.tables.metadata,
)


def _all_tables() -> sa.MetaData:
    together = sa.MetaData()
    for metadata in _METADATA:
        for table in metadata.sorted_tables:
            table.to_metadata(together)
    return together


@pytest.fixture(params=[SQLITE, POSTGRESQL])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without a schema."""
    if request.param == SQLITE:
        yield f"sqlite:///{tmp_path}/new.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database(migrated=False) as url:
        yield url


def test_tables_and_migrations_agree(empty_url: str) -> None:
    database = open_database(empty_url)
    upgrade_schema(database.engine)
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, _all_tables()) == []
    database.close()


def test_indexes_and_autoincrement_agree_too(tmp_path: Path) -> None:
    migrated, created = (open_database(f"sqlite:///{tmp_path}/{name}.db") for name in ("migrated", "created"))
    upgrade_schema(migrated.engine)
    for metadata in _METADATA:
        with created.write() as connection:
            metadata.create_all(connection)

    def schema(engine: sa.Engine) -> dict[str, str]:
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'alembic%'"
        with engine.connect() as connection:
            return {name: " ".join(sql.split()) for name, sql in connection.exec_driver_sql(query)}

    found, wanted = schema(migrated.engine), schema(created.engine)
    assert found.keys() == wanted.keys()
    indexes = [name for name in wanted if name.startswith(("ix_", "ux_"))]
    assert indexes
    assert [found[name] for name in indexes] == [wanted[name] for name in indexes]
    assert "AUTOINCREMENT" in found["prices"]
    migrated.close()
    created.close()


def test_upgrading_again_changes_nothing(empty_url: str) -> None:
    database = open_database(empty_url)
    assert not is_current(database.engine)
    upgrade_schema(database.engine)
    assert is_current(database.engine)
    upgrade_schema(database.engine)
    assert is_current(database.engine)
    database.close()


def test_a_schema_of_a_newer_version_is_left_as_it_is(empty_url: str) -> None:
    database = open_database(empty_url)
    upgrade_schema(database.engine)
    with database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    upgrade_schema(database.engine)
    with database.read() as connection:
        assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == "9999"
    database.close()


def test_a_folder_with_a_percent_sign_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "a%20b%(c)s"
    folder.mkdir()
    database = open_database(f"sqlite:///{str(folder).replace('%', '%25')}/new.db")
    upgrade_schema(database.engine)
    assert is_current(database.engine)
    database.close()


@pytest.mark.load
@pytest.mark.timeout(60)
def test_processes_that_start_together_all_find_the_schema(empty_url: str) -> None:
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", _UPGRADE, empty_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for start in starts:
        assert start.stdout is not None
        assert start.stdout.readline() == "ready\n"
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("\n")
        start.stdin.flush()
    errors = [start.communicate(timeout=50)[1] for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], errors
    database = open_database(empty_url)
    assert is_current(database.engine)
    database.close()


@pytest.mark.load
def test_each_revision_comes_from_the_one_before_and_goes_back(empty_url: str) -> None:
    database = open_database(empty_url)
    config = _config(SCRIPT_LOCATION)
    revisions = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]

    def migrate(deed: Callable[[Config, str], None], revision: str) -> None:
        with database.write() as connection:
            config.attributes["connection"] = connection
            deed(config, revision)

    for revision in reversed(revisions):
        migrate(command.upgrade, revision)
    for revision in [*revisions[1:], "base"]:
        migrate(command.downgrade, revision)
    with database.read() as connection:
        assert set(sa.inspect(connection).get_table_names()) <= {"alembic_version"}
    upgrade_schema(database.engine)
    assert is_current(database.engine)
    database.close()


def test_accounts_and_keys_that_exist_keep_what_they_had(empty_url: str) -> None:
    """From the schema before quotas: no account is limited by an upgrade, and every key goes on working."""
    database = open_database(empty_url)
    config = _config(SCRIPT_LOCATION)
    account: dict[str, object] = {
        "id": "a" * 32,
        "name": "old",
        "created_at_ns": 1,
        "suspended": False,
        "concurrency": 3,
    }
    key: dict[str, object] = {
        "id": "k" * 32,
        "account_id": "a" * 32,
        "name": "old",
        "kind": "inference",
        "key_hash": "h",
        "hint": "h",
    }
    key |= {"scopes": "ai:run", "created_at_ns": 1, "disabled": False}
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
        for table, row in (("accounts", account), ("api_keys", key)):
            names = ", ".join(row)
            values = ", ".join(f":{name}" for name in row)
            connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({values})"), row)
    upgrade_schema(database.engine)
    with database.read() as connection:
        bearer = TenancyStore(connection).bearer("h")
    assert bearer is not None
    assert (bearer.account.plan, bearer.account.concurrency, bearer.quotas) == (Plan.PAID, 3, ())
    assert (bearer.key.models, bearer.key.networks, bearer.key.lineage_id) == (None, None, None)
    database.close()


def test_every_row_of_the_schema_before_is_there_after_the_upgrade(empty_url: str) -> None:
    database = open_database(empty_url)
    config = _config(SCRIPT_LOCATION)
    head, before = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][:2]
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, before)
        wanted = fill_every_table(connection, 3)
    upgrade_schema(database.engine)
    assert revision_of(database.engine) == head == newest_revision()
    with database.read() as connection:
        there = {table.name: table for table in every_table(connection)}
        found = {name: connection.scalar(sa.select(sa.func.count()).select_from(there[name])) for name in wanted}
    assert found == wanted
    database.close()


def test_what_the_version_before_says_to_the_database_still_works_on_the_schema_of_this_one(empty_url: str) -> None:
    """Statements name the columns of the schema before, as its processes do while they are replaced one by one."""
    database = open_database(empty_url)
    config = _config(SCRIPT_LOCATION)
    before = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][1]
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, before)
        known = every_table(connection)
        fill(connection, known, range(2))
    upgrade_schema(database.engine)
    with database.write() as connection:
        fill(connection, known, range(2, 4))
        for table in known:
            found = connection.execute(sa.select(*table.c)).all()
            assert len(found) == 4, table.name
            (first,) = list(table.primary_key.columns)[:1]
            kept = {column.name: found[0]._mapping[column.name] for column in table.c if column.name != first.name}
            assert connection.execute(
                table.update().where(first == found[0]._mapping[first.name]).values(kept)
            ).rowcount
    with database.write() as connection:
        for table in reversed(known):
            assert connection.execute(table.delete()).rowcount == 4, table.name
    database.close()


def test_what_lines_take_that_are_there_is_counted(empty_url: str) -> None:
    database = open_database(empty_url)
    config = _config(SCRIPT_LOCATION)
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0030")
        tables = {table.name: table for table in every_table(connection) if table.name in {"batches", "batch_lines"}}
        fill(connection, list(tables.values()), range(2))
        batches, lines = tables["batches"], tables["batch_lines"]
        first, second = connection.scalars(sa.select(batches.c.id).order_by(batches.c.id)).all()
        connection.execute(lines.update().values(batch_id=first, body=b"asked", answer=b"said"))
        connection.execute(
            lines.update()
            .where(lines.c.number == sa.select(sa.func.max(lines.c.number)).scalar_subquery())
            .values(body=None)
        )
    upgrade_schema(database.engine)
    with database.read() as connection:
        found = connection.execute(sa.text("SELECT id, stored_bytes FROM batches ORDER BY id")).all()
    assert [tuple(row) for row in found] == [(first, 13), (second, 0)]
    database.close()


def test_who_set_a_rule_is_what_the_log_says_of_it(empty_url: str) -> None:
    """From the schema before rules said whose they are: of a key's rule the newest entry tells, or nobody."""
    database = open_database(empty_url)
    config = _config(SCRIPT_LOCATION)
    account, operator, tenant, person = ("a" * 32, "o" * 32, "t" * 32, "p" * 32)
    key = {"account_id": account, "name": "k", "kind": "admin", "hint": "h", "created_at_ns": 1, "disabled": False}
    rows: dict[str, list[dict[str, object]]] = {
        "accounts": [{"id": account, "name": "a", "created_at_ns": 1, "suspended": False}],
        "api_keys": [
            key | {"id": operator, "key_hash": "1", "scopes": "account:admin operator:write"},
            key | {"id": tenant, "key_hash": "2", "scopes": "account:admin"},
        ],
        "users": [
            {"id": person, "email": "p", "name": "p", "operator": True, "disabled": False, "created_at_ns": 1},
        ],
        "quotas": [
            {"account_id": account, "key_id": key_id, "model": "", "meter": "requests_per_day", "limit_amount": 1}
            for key_id in ("", "k1", "k2", "k3", "k4", "k5")
        ],
        "budgets": [
            {"id": id_, "account_id": account, "period": "day", "limit_nano": 1, "hard": True, "created_at_ns": 1}
            for id_ in ("b1", "b2")
        ],
        "audit_log": [
            {
                "number": number,
                "at_ns": 1,
                "account_id": account,
                "actor_kind": kind,
                "actor_id": actor,
                "action": "limit.set" if detail is not None else "budget.add",
                "subject": subject,
                "detail": json.dumps({"key_id": detail, "model": None, "project_id": None}),
                "previous_hash": "",
                "hash": "",
            }
            for number, (kind, actor, subject, detail) in enumerate(
                [
                    ("command line", "", "requests_per_day", "k1"),
                    ("key", operator, "requests_per_day", "k2"),
                    ("user", person, "requests_per_day", "k3"),
                    ("key", operator, "requests_per_day", "k4"),
                    ("key", tenant, "requests_per_day", "k4"),
                    ("command line", "", "b1", None),
                    ("key", tenant, "b2", None),
                ],
                start=1,
            )
        ],
    }
    with database.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0028")
        tables = {table.name: table for table in every_table(connection)}
        for name, some in rows.items():
            connection.execute(tables[name].insert(), some)
    upgrade_schema(database.engine)
    with database.read() as connection:
        found = {(quota.key_id, quota.set_by.value) for quota in TenancyStore(connection).quotas(account)}
        budgets = {(budget.id, budget.set_by.value) for budget in read_budgets(connection, account)}
    assert {key_id for key_id, set_by in found if set_by == "operator"} == {None, "k1", "k2", "k3"}
    assert {key_id for key_id, set_by in found if set_by == "account"} == {"k4", "k5"}
    assert budgets == {("b1", "operator"), ("b2", "account")}
    # A limit that both set is the tighter one again when the schema goes back.
    with database.write() as connection:
        connection.execute(
            sa.text(
                "INSERT INTO quotas (account_id, key_id, model, meter, limit_amount, set_by) "
                "VALUES (:account, 'k1', '', 'requests_per_day', 7, 'account')"
            ),
            {"account": account},
        )
        config.attributes["connection"] = connection
        command.downgrade(config, "0028")
        left = connection.execute(sa.text("SELECT limit_amount FROM quotas WHERE key_id = 'k1'")).scalars().all()
        assert left == [1]
    database.close()
