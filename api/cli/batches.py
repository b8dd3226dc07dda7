"""`pagegate batches`: what may wait and how far it is, for operators. Thin: gateway/batches/store.py's.

It works on the database, so that it also works while no service runs; a running one notices a cancelled batch within a
second.
"""

import time
from typing import Annotated

import typer

from api.cli.session import AsJson, Session, open_session, print_record, print_rows
from api.console.batches import batch_fields
from api.settings import load_settings
from gateway.batches.store import BatchStore

app = typer.Typer(help="List and cancel batches.", no_args_is_help=True)


@app.command("list")
def list_command(
    *,
    account: Annotated[str | None, typer.Option(help="Of this account alone.")] = None,
    ended: Annotated[bool, typer.Option("--ended", help="Those too that are over.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1_000)] = 100,
    as_json: AsJson = False,
) -> None:
    """List batches and background runs, the newest first."""
    with open_session() as session:
        found = _store(session).newest(account, ended=ended, limit=limit)
    columns = ("id", "account_id", "model", "state", "lines", "succeeded", "failed", "created_at")
    print_rows("Batches", [batch_fields(batch) for batch in found], columns=columns, as_json=as_json)


@app.command("cancel")
def cancel_command(
    batch_id: Annotated[str, typer.Argument(help="Of a batch in the list.", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Run no more of a batch; what runs ends, and is charged."""
    with open_session() as session:
        store = _store(session)
        batch = store.cancel(store.find(batch_id).account_id, batch_id)
    print_record("Cancelled", batch_fields(batch), as_json=as_json)


def _store(session: Session) -> BatchStore:
    return BatchStore(session.database, load_settings().batches, clock=time.time_ns, told=lambda *_: None)
