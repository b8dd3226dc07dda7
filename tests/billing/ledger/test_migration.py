"""What was used before there was a ledger is booked when the schema is upgraded."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from billing.audit import violations
from billing.ledger.wallet import Wallets
from billing.store import UsageStore
from tenancy.database import begin_write, open_database
from tenancy.migrations import SCRIPT_LOCATION, upgrade_schema
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT, price
from tests.billing.rows import event_row

COST = 1_010_000


def test_events_of_before_are_owed_and_rolled_up(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/old.db")
    config = Config()
    config.set_main_option("script_location", str(SCRIPT_LOCATION))
    config.set_main_option("path_separator", "os")
    with begin_write(database.engine) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        _insert(connection, "prices", asdict(price()) | {"version": 1})
        rows = [
            event_row(id=f"r{number}", started_at_ns=number * 1_800 * 10**9, account_id=account)
            for number, account in enumerate([ACCOUNT, ACCOUNT, ACCOUNT, OTHER_ACCOUNT])
        ]
        free = event_row(id="free", charged=False, outcome="refused", cost_nano=0, neurons_micro=0)
        _insert(connection, "usage_events", *rows, free)
    upgrade_schema(database.engine)
    wallets = Wallets(database, clock=lambda: 1)
    assert (wallets.show(ACCOUNT).owed_nano, wallets.show(OTHER_ACCOUNT).owed_nano) == (3 * COST, COST)
    assert UsageStore(database).usage_summary(ACCOUNT, 0, 2**62).totals.requests == 4
    assert violations(database) == []
    database.close()


def _insert(connection: sa.Connection, name: str, *rows: dict[str, Any]) -> None:
    """As far as the table has their columns in this revision."""
    table = sa.Table(name, sa.MetaData(), autoload_with=connection)
    known = table.columns.keys()
    connection.execute(table.insert(), [{name: row[name] for name in known if name in row} for row in rows])


def test_a_service_without_usage_has_an_empty_ledger(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/new.db")
    upgrade_schema(database.engine)
    assert violations(database) == []
    database.close()
