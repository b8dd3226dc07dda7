"""`pagegate models pull|list`: the checkpoints that the embedded engine can serve, and getting them into the cache.

`api/cli/main.py` mounts `app`; `pagegate serve` calls `pull_showing_progress` at its first start. What a checkpoint is
and how it arrives is the business of `backends/checkpoints.py`.
"""

from pathlib import Path
from typing import Annotated, NoReturn

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from api.cli.session import open_session, print_record
from api.settings import load_settings
from backends.checkpoints import (
    CHECKPOINTS,
    DEFAULT_CHECKPOINT,
    CheckpointError,
    checkpoint_path,
    find_checkpoint,
    is_ready,
    pull,
)
from tenancy.model_switches import disabled_model_ids, set_model_disabled

app = typer.Typer(help="Fetch checkpoints for the embedded engine; switch models off and on.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


ModelId = Annotated[str, typer.Argument(help="Its public id.", show_default=False)]


@app.command("pull")
def pull_command(
    name: Annotated[str, typer.Argument(help="A name that `models list` shows.")] = DEFAULT_CHECKPOINT,
    *,
    as_json: AsJson = False,
) -> None:
    """Download, check and convert a checkpoint unless the cache has it; a broken download resumes."""
    try:
        path = pull_showing_progress(name, load_settings().cache_dir)
    except CheckpointError as error:
        _fail(error, as_json=as_json)
    if as_json:
        _echo_json({"name": name, "ready": True, "path": str(path)})
    else:
        typer.echo(f"{name} is ready: {path}")


@app.command("list")
def list_command(*, as_json: AsJson = False) -> None:
    """Show the known checkpoints and whether the cache has them."""
    cache_dir = load_settings().cache_dir
    rows = [
        {
            "name": checkpoint.name,
            "ready": is_ready(checkpoint, cache_dir),
            "path": str(checkpoint_path(checkpoint.name, cache_dir)),
            "source": checkpoint.requirement,
            "download_bytes": checkpoint.wheel_bytes,
        }
        for checkpoint in CHECKPOINTS.values()
    ]
    if as_json:
        _echo_json(rows)
        return
    table = Table()
    for title in ("Name", "In the cache", "Source", "Folder"):
        table.add_column(title, overflow="fold")  # a path cut short with dots is of no use
    for row in rows:
        table.add_row(str(row["name"]), "yes" if row["ready"] else "no", str(row["source"]), str(row["path"]))
    Console().print(table)


@app.command("disable")
def disable_command(model: ModelId, *, as_json: AsJson = False) -> None:
    """Switch a model off for everybody, within a second on every process. Running answers end normally."""
    _switch(model, disabled=True, as_json=as_json)


@app.command("enable")
def enable_command(model: ModelId, *, as_json: AsJson = False) -> None:
    """Switch a model on again."""
    _switch(model, disabled=False, as_json=as_json)


def _switch(model: str, *, disabled: bool, as_json: bool) -> None:
    with open_session() as session:
        set_model_disabled(session.database, model, disabled=disabled)
        off = sorted(disabled_model_ids(session.database))
    print_record("Models", {"model": model, "disabled": model in off, "all_disabled": off}, as_json=as_json)


def pull_showing_progress(name: str, cache_dir: Path) -> Path:
    """`pull` with a bar on a terminal, a line every tenth elsewhere; on standard error, so that output stays clean."""
    if is_ready(find_checkpoint(name), cache_dir):
        return checkpoint_path(name, cache_dir)
    console = Console(stderr=True)
    if not console.is_terminal:
        return pull(name, cache_dir, _TenthLines(name))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"Fetching {name}")

        def show(here: int, total: int) -> None:
            description = f"Fetching {name}" if here < total else f"Converting {name}"
            bar.update(task, description=description, completed=here, total=total)

        return pull(name, cache_dir, show)


class _TenthLines:
    """Says how far the download is, once for each tenth."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tenths_said = -1

    def __call__(self, here: int, total: int) -> None:
        tenths = min(10, here * 10 // total)
        if tenths == self._tenths_said:
            return
        self._tenths_said = tenths
        megabytes = f"{here // 10**6} of {total // 10**6} MB"
        typer.echo(f"Fetching {self._name}: {tenths * 10} % ({megabytes})", err=True)
        if here >= total:
            typer.echo(f"Converting {self._name} (once, some seconds)", err=True)


def _fail(error: CheckpointError, *, as_json: bool) -> NoReturn:
    if as_json:
        _echo_json({"error": {"code": error.code, "message": error.message}})
    else:
        typer.echo(error.message, err=True)
    raise typer.Exit(1)


def _echo_json(content: object) -> None:
    typer.echo(orjson.dumps(content).decode())
