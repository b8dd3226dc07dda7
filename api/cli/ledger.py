"""`pagegate ledger`: is what was recorded consistent, and unchanged? Thin: audit.py and invoices/seal.py check."""

from typing import Annotated

import typer

from api.cli.session import AsJson, open_session, print_record, print_rows
from billing.audit import violations
from billing.invoices.seal import prove_months

app = typer.Typer(help="Check the ledger.", no_args_is_help=True)


@app.command("check")
def check_command(*, as_json: AsJson = False) -> None:
    """Recompute costs, ledger and rollups from the raw events. Exit code 1 if anything contradicts."""
    with open_session() as session:
        broken = violations(session.database)
    print_record("Ledger", {"ok": not broken, "violations": broken}, as_json=as_json)
    if broken:
        raise typer.Exit(1)


@app.command("prove")
def prove_command(
    month: Annotated[str | None, typer.Argument(help="Such as 2026-11.", show_default="every closed month")] = None,
    *,
    account_id: Annotated[str | None, typer.Option("--account", help="Only this account.", show_default="all")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute closed months' seals again from what is booked. Exit code 1 if one was changed after it was closed."""
    with open_session() as session:
        rows = [
            {
                "account_id": proof.account_id,
                "month": proof.month,
                "transactions": proof.now.transactions,
                "sealed": proof.sealed.digest,
                "now": proof.now.digest,
                "holds": proof.holds,
            }
            for proof in prove_months(session.database, month, account_id)
        ]
    print_rows("Closed months", rows, columns=("account_id", "month", "transactions", "now", "holds"), as_json=as_json)
    if not all(row["holds"] for row in rows):
        raise typer.Exit(1)
