"""`pagegate config check`: the effective settings, or what is wrong with them."""

from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy.engine import make_url

from api.settings import Settings, load_settings

app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at the configuration."""


@app.command()
def check(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:  # noqa: FBT002 - typer's flag
    """Read the environment and the file as `serve` would, and print what is in force. Passwords are left out."""
    settings = load_settings()
    effective = _redacted(settings)
    if as_json:
        typer.echo(orjson.dumps(effective, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table("setting", "value", title="Effective settings")
    for name, value in _flat(effective):
        table.add_row(name, value)
    Console().print(table)


def _redacted(settings: Settings) -> dict[str, Any]:
    values = settings.model_dump(mode="json", by_alias=True)
    values["database_url"] = make_url(settings.database_url).render_as_string(hide_password=True)
    return values


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, "" if value is None else str(value)))
    return rows
