"""`pagegate ledger`: is everything that was recorded consistent? Thin: the checks are billing/audit.py's."""

import typer

from api.cli.session import AsJson, open_session, print_record
from billing.audit import violations

app = typer.Typer(help="Check the ledger.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Without a second command typer would drop the name of the first."""


@app.command("check")
def check_command(*, as_json: AsJson = False) -> None:
    """Recompute costs, ledger and rollups from the raw events. Exit code 1 if anything contradicts."""
    with open_session() as session:
        broken = violations(session.database)
    print_record("Ledger", {"ok": not broken, "violations": broken}, as_json=as_json)
    if broken:
        raise typer.Exit(1)
