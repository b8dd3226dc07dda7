"""A database at the newest revision for each test: SQLite, copied from a file that was migrated once, or PostgreSQL.

A module that says `pytestmark = over_both_databases` runs over both; the others run over SQLite.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenancy.database import Database, open_database
from tests import migrated
from tests.stores import PostgresServer
from tests.tenancy.clock import SettableClock

SQLITE, POSTGRESQL = "sqlite", "postgresql"
over_both_databases = pytest.mark.parametrize("database_url", [SQLITE, POSTGRESQL], indirect=True)

PEPPER = bytes(range(32))


@pytest.fixture(scope="session")
def migrated_file() -> Path:
    return migrated.migrated_file()


@pytest.fixture
def database_url(request: pytest.FixtureRequest, migrated_file: Path, tmp_path: Path) -> Iterator[str]:
    if getattr(request, "param", SQLITE) == POSTGRESQL:
        server: PostgresServer = request.getfixturevalue("postgres")
        with server.database() as url:
            yield url
        return
    shutil.copy(migrated_file, tmp_path / "pagegate.db")
    yield f"sqlite:///{tmp_path}/pagegate.db"


@pytest.fixture(autouse=True)
def patience_with_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known key lives on where a look-up takes long. Where none is to, it may take as long as on a busy machine."""
    monkeypatch.setattr("tenancy.authenticate._STALE_WAIT_S", 20.0)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url)
    yield opened
    opened.close()


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()
