"""`pagegate rollout status|share|promote|abort|start|evaluated`: a new revision of a model beside the old one.

What is tried is in the deployment file (backends/rollout.py); what is decided of it is in the database, so that it
works while no service runs too. A running one follows within two seconds. Thin: gateway/rollouts does it.
"""

import time
from typing import Annotated

import typer

from api.cli.session import AsJson, open_session, print_record, print_rows
from api.settings import load_settings
from backends.topology import Model, read_deployment
from gateway.rollouts import store
from gateway.rollouts.report import report
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import Database

app = typer.Typer(help="Try a new revision of a model beside the old one.", no_args_is_help=True)

ModelId = Annotated[str, typer.Argument(help="Its public id.", show_default=False)]


@app.command("status")
def status_command(*, as_json: AsJson = False) -> None:
    """Show all rollouts: shares, what was seen of both revisions, and what is found."""
    with open_session() as session:
        rows = report(session.database, _models(), time.time_ns())
    if as_json:
        print_rows("", rows, columns=(), as_json=True)
        return
    for row in rows:
        row["requests"] = f"{row['new']['requests']}, {row['old']['requests']} old"
        row["errors"] = f"{row['new']['errors']}, {row['old']['errors']} old"
    columns = ("model", "new_revision", "state", "share_percent", "requests", "errors", "verdict")
    print_rows("Rollouts", rows, columns=columns, as_json=False)
    for row in rows:  # a line each: the last words of an engine are not to be folded
        typer.echo(f"{row['model']} {row['new_revision']}, {row['state'].replace('_', ' ')}: {row['why']}")


@app.command("share")
def share_command(
    model: ModelId,
    percent: Annotated[float, typer.Argument(help="Of new conversations.", min=0, max=100, show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Send another share of conversations to the new revision."""
    with open_session() as session:
        store.set_share(session.database, model, round(percent * 100), by=COMMAND_LINE, at_ns=time.time_ns())
        _show(session.database, model, as_json=as_json)


@app.command("promote")
def promote_command(
    model: ModelId,
    *,
    unseen: Annotated[bool, typer.Option("--unseen", help="Even if it has served no request yet.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have the new revision serve all. The old one ends its answers, and what was launched for it stops."""
    with open_session() as session:
        store.promote(session.database, model, by=COMMAND_LINE, at_ns=time.time_ns(), unseen=unseen)
        _show(session.database, model, as_json=as_json)


@app.command("abort")
def abort_command(
    model: ModelId,
    *,
    why: Annotated[str, typer.Option(help="For the log.")] = "an operator took it back",
    as_json: AsJson = False,
) -> None:
    """Take the new revision back: the old one serves all, and the new one ends its answers."""
    with open_session() as session:
        store.roll_back(session.database, model, by=COMMAND_LINE, at_ns=time.time_ns(), why=why)
        _show(session.database, model, as_json=as_json)


@app.command("start")
def start_command(model: ModelId, *, as_json: AsJson = False) -> None:
    """Begin once more what is over, with its last share; what was counted before does not count any more."""
    with open_session() as session:
        store.start_again(session.database, model, by=COMMAND_LINE, at_ns=time.time_ns())
        _show(session.database, model, as_json=as_json)


@app.command("evaluated")
def evaluated_command(
    model: ModelId,
    score: Annotated[float, typer.Argument(help="As the file's evaluation_min counts.", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Note the score that an evaluation gave the new revision."""
    with open_session() as session:
        store.note_evaluation(session.database, model, score, by=COMMAND_LINE, at_ns=time.time_ns())
        _show(session.database, model, as_json=as_json)


def _show(database: Database, model: str, *, as_json: bool) -> None:
    [row] = [row for row in report(database, _models(), time.time_ns()) if row["model"] == model]
    print_record("Rollout", row, as_json=as_json)


def _models() -> tuple[Model, ...]:
    """Of the file in force, if there is one: its limits judge."""
    path = load_settings().deployment
    return () if path is None else read_deployment(path).models
