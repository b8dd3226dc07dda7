"""What the account, key, price and usage commands share: the database they work on, and how they print.

The commands use it; nothing else does. They work while the service runs, and before its first start.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

from api.settings import load_settings
from billing.instants import instant_text
from tenancy.database import Database, open_database
from tenancy.migrations import upgrade_schema
from tenancy.pepper import open_pepper_of
from tenancy.provisioning import ProvisioningInvalid

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]

_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Session:
    database: Database
    pepper_path: Path

    def pepper(self) -> bytes:
        return open_pepper_of(self.database, self.pepper_path)


@contextmanager
def open_session() -> Iterator[Session]:
    """The configured database, made and brought up to date if need be. What can't be accepted becomes a usage error.

    Gateways that share meters are told that something was done, so that they look at once.
    """
    settings = load_settings()
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    database = open_database(settings.database_url, busy_timeout_s=settings.tenancy.database_busy_timeout_s)
    deeds: list[None] = []
    database.after_deed = partial(deeds.append, None)
    try:
        upgrade_schema(database.engine)
        yield Session(database, settings.pepper_path)
    except ProvisioningInvalid as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        database.close()
        if deeds and settings.meters_url:
            from tenancy.deed_news import tell  # noqa: PLC0415 - its client comes with the extra `shared` alone

            asyncio.run(tell(settings.meters_url))


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str], as_json: bool) -> None:
    """All fields as a JSON list, or the named ones as a table."""
    if as_json:
        typer.echo(orjson.dumps(rows).decode())
        return
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "id")  # an id is there to be copied
    for row in rows:
        table.add_row(*(_text(row[column]) for column in columns))
    Console().print(table)


def print_record(title: str, record: Mapping[str, Any], *, as_json: bool) -> None:
    """One thing: a JSON object, or a line per field."""
    if as_json:
        typer.echo(orjson.dumps(record).decode())
        return
    table = Table("field", "value", title=title)
    for field, value in record.items():
        table.add_row(field, _text(value))
    Console().print(table)


def time_text(instant_ns: int | None) -> str | None:
    """ISO 8601, UTC, whole microseconds."""
    return None if instant_ns is None else instant_text(instant_ns)


def parse_time(text: str) -> int:
    """Unix nanoseconds of an ISO 8601 date or time; UTC unless it says otherwise."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not an ISO 8601 date or time, such as 2026-11-29T12:00:00Z.") from error
    since = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
