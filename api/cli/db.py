"""`pagegate db`: the database's schema and its whole content. The work is tenancy/migrations.py's and copying.py's."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import sqlalchemy as sa
import typer

from api.cli.session import AsJson, print_record, print_rows
from api.settings import Settings, load_settings
from billing.spool import Spool
from billing.store import UsageStore
from tenancy import audit_log
from tenancy.copying import copy_database
from tenancy.database import Database, open_database
from tenancy.migrations import newest_revision, revision_of, upgrade_schema
from tenancy.walls import protect, unprotected

app = typer.Typer(help="Bring the database's schema up to date, check it, copy it.", no_args_is_help=True)


@app.command("upgrade")
def upgrade_command(*, as_json: AsJson = False) -> None:
    """Bring the schema to this version's. Every start does so too; doing it first makes starts quick."""
    with _configured() as database:
        before = revision_of(database.engine)
        upgrade_schema(database.engine)
        after = revision_of(database.engine)
    print_record("Schema", {"before": before, "now": after}, as_json=as_json)


@app.command("check")
def check_command(*, as_json: AsJson = False) -> None:
    """Whether the schema is this version's and all that must be true of the content is; exit code 1 if not."""
    with _configured() as database:
        revision = revision_of(database.engine)
        wrong = [] if revision == newest_revision() else [f"the schema is at {revision}: run 'pagegate db upgrade'"]
        if not wrong:
            wrong += _damage(database)
            wrong += UsageStore(database).violations()
            wrong += audit_log.verify(database).broken
            with database.read() as connection:
                wrong += unprotected(connection)
    print_record("Database", {"revision": revision, "wrong": wrong}, as_json=as_json)
    if wrong:
        raise typer.Exit(1)


@app.command("protect")
def protect_command(
    *,
    role: Annotated[
        str | None, typer.Option(help="Whom the service connects as.", show_default="the tables' owner")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wall accounts off from each other inside PostgreSQL, as the tables' owner; again after each upgrade.

    With a role, grant it what the service needs: of the ledger and the audit log it may alter nothing. All processes
    of versions before this one must be gone: they would see nothing.
    """
    with _configured() as database, database.write() as connection:
        walled = protect(connection, role)
    print_record("Protected", {"tables": walled, "role": role}, as_json=as_json)


@app.command("copy")
def copy_command(
    target_url: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="postgresql+psycopg://…; a password is better in ~/.pgpass.", show_default=False
        ),
    ],
    *,
    as_json: AsJson = False,
) -> None:
    """Copy all of the configured database into an empty one, comparing every row. Stop the service first.

    Records that still wait in the spool go to whichever database the next start names.
    """
    settings = load_settings()
    target = open_database(target_url)
    try:
        with _configured() as source, _nobody_serving(settings):
            upgrade_schema(source.engine)
            upgrade_schema(target.engine)
            began = time.monotonic()
            rows = copy_database(source, target)
            took_s = time.monotonic() - began
    finally:
        target.close()
    if as_json:
        print_record("Copied", {"tables": rows, "seconds": round(took_s, 1)}, as_json=True)
        return
    print_rows(
        f"Copied and compared in {took_s:.1f} s",
        [{"table": table, "rows": count} for table, count in rows.items()],
        columns=("table", "rows"),
        as_json=False,
    )


@contextmanager
def _configured() -> Iterator[Database]:
    """The configured database as it is: its schema is not touched."""
    settings = load_settings()
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = open_database(settings.database_url, busy_timeout_s=settings.tenancy.database_busy_timeout_s)
    try:
        yield database
    finally:
        database.close()


@contextmanager
def _nobody_serving(settings: Settings) -> Iterator[None]:
    """A process that serves from this data folder would go on writing to what was copied. Raises OSError then."""
    with ExitStack() as owned:
        for worker in range(1, settings.workers + 1):
            spool = Spool(
                settings.spool_dir(worker),
                segment_bytes_max=settings.billing.spool_segment_bytes_max,
                high_water_bytes=settings.billing.spool_high_water_bytes,
            )
            owned.callback(spool.close)
        yield


def _damage(database: Database) -> list[str]:
    """What SQLite itself finds broken in its file. PostgreSQL has its own ways."""
    if database.engine.dialect.name != "sqlite":
        return []
    with database.read() as connection:
        found = list(connection.scalars(sa.text("PRAGMA integrity_check")))
        dangling = connection.execute(sa.text("PRAGMA foreign_key_check")).all()
    damage = [f"the file is damaged: {text}" for text in found if text != "ok"]
    return damage + [f"a row of {row[0]} refers to one of {row[2]} that is not there" for row in dangling[:100]]
