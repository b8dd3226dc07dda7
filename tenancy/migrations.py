"""Brings the database's schema to the newest revision. Called at every start, by every process; knows no table.

The history itself is in deploy/migrations and covers every package's tables.
"""

from functools import cache
from pathlib import Path

import sqlalchemy as sa
import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from tenancy.database import begin_read, begin_write, let_one_pass
from tenancy.errors import TenancyUnavailable

_ATTEMPTS = 6  # each waits as long as a write may for another: half a minute in all
SCRIPT_LOCATION = Path(__file__).resolve().parents[1] / "deploy" / "migrations"

log = structlog.get_logger(__name__)


def upgrade_schema(engine: sa.Engine, script_location: Path = SCRIPT_LOCATION) -> None:
    """Apply what is missing, in one transaction. Of processes that start together, the later ones find it done.

    A schema that a newer version has made is left as it is: newer versions only add to what this one needs.
    """
    for attempts_left in reversed(range(_ATTEMPTS)):
        if is_current(engine, script_location):
            return
        if _is_newer(engine, script_location):
            log.warning("the schema is newer than this version, which goes on with it")
            return
        try:
            _upgrade(engine, _config(script_location))
        except TenancyUnavailable:  # perhaps another process upgrades, for longer than a write waits
            if not attempts_left:
                raise


def _upgrade(engine: sa.Engine, config: Config) -> None:
    with begin_write(engine) as connection:
        let_one_pass(connection)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def is_current(engine: sa.Engine, script_location: Path = SCRIPT_LOCATION) -> bool:
    """Whether the schema is at the newest revision that this program knows."""
    with begin_read(engine) as connection:
        return list(MigrationContext.configure(connection).get_current_heads()) == [newest_revision(script_location)]


def revision_of(engine: sa.Engine) -> str | None:
    """None for a database without a schema."""
    with begin_read(engine) as connection:
        return MigrationContext.configure(connection).get_current_revision()


@cache
def newest_revision(script_location: Path = SCRIPT_LOCATION) -> str | None:
    """The newest one that this program knows: read once, since alembic imports every revision to say it."""
    return ScriptDirectory.from_config(_config(script_location)).get_current_head()


def _is_newer(engine: sa.Engine, script_location: Path) -> bool:
    """Whether a version has been here that knows revisions behind our last one. Revisions are numbers in order."""
    newest = newest_revision(script_location) or ""
    with begin_read(engine) as connection:
        found = MigrationContext.configure(connection).get_current_heads()
    return any(revision > newest for revision in found)


def _config(script_location: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(script_location).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
