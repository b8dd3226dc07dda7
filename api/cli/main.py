"""The `pagegate` command: mounts the groups, and turns expected failures into one sentence and exit code 1."""

import sys
from collections.abc import Sequence

import typer

from api.cli import (
    accounts,
    budgets,
    config,
    dashboard,
    engine,
    invoices,
    keys,
    ledger,
    models,
    prices,
    replay,
    serve,
    top,
    usage,
    users,
    wallet,
    webhooks,
)
from api.settings import SettingsInvalid
from backends.errors import BackendError
from billing.errors import BillingError
from tenancy.errors import TenancyError

app = typer.Typer(
    help="Pagegate: a serverless inference API in front of SGLang.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("replay")(replay.replay_command)
app.command("top")(top.top_command)
app.command("dashboard")(dashboard.dashboard_command)
app.add_typer(models.app, name="models")
app.add_typer(accounts.app, name="accounts")
app.add_typer(keys.app, name="keys")
app.add_typer(users.app, name="users")
app.add_typer(users.members_app, name="members")
app.add_typer(users.audit_app, name="audit")
app.add_typer(prices.app, name="prices")
app.add_typer(usage.app, name="usage")
app.add_typer(wallet.app, name="wallet")
app.add_typer(budgets.app, name="budgets")
app.add_typer(invoices.app, name="invoices")
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(ledger.app, name="ledger")
app.add_typer(engine.app, name="engine")
app.add_typer(config.app, name="config")


def run(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit."""
    try:
        app(args=None if arguments is None else list(arguments))
    except (SettingsInvalid, BackendError, BillingError, TenancyError, serve.ServeFailed) as error:
        typer.echo(f"pagegate: {error}", err=True)
        sys.exit(1)
