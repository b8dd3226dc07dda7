"""`pagegate db`: upgrade, check, and copy to PostgreSQL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from billing.spool import Spool
from tenancy.authenticate import Authenticator
from tenancy.database import open_database
from tenancy.pepper import open_pepper
from tests.api.cli.conftest import Pagegate
from tests.stores import PostgresServer

Answer = Callable[..., Any]


def test_a_schema_is_checked_upgraded_and_checked(answer: Answer, pagegate: Pagegate, home: Path) -> None:
    (home / "pagegate.db").unlink(missing_ok=True)
    code, out, _ = pagegate("db", "check")
    assert (code, "run 'pagegate db upgrade'" in out.replace("\n", " ")) == (1, True)
    upgraded = answer("db", "upgrade")
    assert (upgraded["before"], upgraded["now"]) == (None, answer("db", "check")["revision"])
    assert answer("db", "upgrade")["before"] == upgraded["now"]


def test_what_contradicts_itself_is_named(answer: Answer, pagegate: Pagegate, home: Path) -> None:
    answer("accounts", "open", "acme")
    database = open_database(f"sqlite:///{home}/pagegate.db")
    with database.write() as connection:
        connection.execute(sa.text("UPDATE audit_log SET subject = 'another'"))
    database.close()
    code, out, _ = pagegate("db", "check", "--json")
    assert (code, "entry 1 was changed" in out) == (1, True)


async def test_a_key_works_on_the_copy(
    answer: Answer, pagegate: Pagegate, home: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_id = answer("accounts", "open", "acme")["id"]
    key = answer("keys", "issue", account_id, "--name", "k")["key"]
    with postgres.database(migrated=False) as url:
        copied = answer("db", "copy", url)
        assert (copied["tables"]["accounts"], copied["tables"]["api_keys"], copied["tables"]["audit_log"]) == (1, 1, 2)
        code, _, said = pagegate("db", "copy", url)
        assert (code, "not empty" in said) == (1, True)
        monkeypatch.setenv("PAGEGATE_DATABASE_URL", url)
        assert answer("db", "check")["wrong"] == []
        database = open_database(url)
        authenticator = Authenticator(database, open_pepper(home / "pepper"))
        assert (await authenticator.authenticate(key)).account_id == account_id
        await authenticator.close()
        database.close()


def test_a_service_that_runs_is_not_copied(answer: Answer, pagegate: Pagegate, home: Path) -> None:
    answer("accounts", "open", "acme")
    spool = Spool(home / "spool", segment_bytes_max=2**20, high_water_bytes=2**20)
    try:
        code, _, said = pagegate("db", "copy", "postgresql+psycopg://nobody@/nothing")
        assert (code, "in use by another process" in said) == (1, True)
    finally:
        spool.close()
