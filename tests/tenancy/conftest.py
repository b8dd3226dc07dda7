"""A real SQLite file at the newest revision for each test, copied from one that was migrated once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tenancy.database import Database, open_database
from tenancy.migrations import upgrade_schema
from tests.tenancy.clock import SettableClock

# A deadline for each example would measure the machine: others may run on it.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

PEPPER = bytes(range(32))


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schema") / "migrated.db"
    database = open_database(f"sqlite:///{path}")
    upgrade_schema(database.engine)
    database.close()
    return path


@pytest.fixture
def database_url(migrated_file: Path, tmp_path: Path) -> str:
    shutil.copy(migrated_file, tmp_path / "pagegate.db")
    return f"sqlite:///{tmp_path}/pagegate.db"


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url)
    yield opened
    opened.close()


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()
