"""The `pagegate` command: mounts the groups, and turns expected failures into one sentence and exit code 1.

With --json the sentence is a JSON object too, on standard error: {"error": {"code", "message"}}.
"""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import orjson
import typer
from typer.main import get_command

from api.cli import (
    accounts,
    batches,
    budgets,
    config,
    dashboard,
    db,
    engine,
    invoices,
    keys,
    ledger,
    models,
    prices,
    projects,
    replay,
    rollouts,
    serve,
    service_accounts,
    top,
    usage,
    users,
    wallet,
    webhooks,
)
from api.settings import SettingsInvalid
from backends.errors import BackendError
from billing.errors import BillingError
from gateway.errors import GatewayError
from tenancy.database import drivers_words
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
app.add_typer(projects.app, name="projects")
app.add_typer(service_accounts.app, name="service-accounts")
app.add_typer(keys.app, name="keys")
app.add_typer(users.app, name="users")
app.add_typer(users.members_app, name="members")
app.add_typer(users.audit_app, name="audit")
app.add_typer(prices.app, name="prices")
app.add_typer(usage.app, name="usage")
app.add_typer(wallet.app, name="wallet")
app.add_typer(budgets.app, name="budgets")
app.add_typer(invoices.app, name="invoices")
app.add_typer(batches.app, name="batches")
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(ledger.app, name="ledger")
app.add_typer(db.app, name="db")
app.add_typer(engine.app, name="engine")
app.add_typer(rollouts.app, name="rollout")
app.add_typer(config.app, name="config")


# What typer raises for a wrong command line; it has no public name for the base of these errors.
_COMMAND_LINE_WRONG: Final[type[Exception]] = typer.BadParameter.__bases__[0]
_USAGE_CODE: Final = 2


def run(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    try:
        # Standing alone, typer tells of a wrong command line itself, and in its own words.
        sys.exit(_command()(args=given, standalone_mode=not as_json) or 0)
    except (SettingsInvalid, BackendError, BillingError, GatewayError, TenancyError, serve.ServeFailed) as error:
        words = drivers_words(error)
        sentence = str(error) if words is None else f"The database can't be used: {words}."
        _tell(sentence, code=getattr(error, "code", "failed"), as_json=as_json)
    except OSError as error:
        sentence = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        _tell(sentence, code="system_error", as_json=as_json)
    except _COMMAND_LINE_WRONG as error:
        _tell(error.format_message(), code="usage", as_json=True)  # type: ignore[attr-defined]  # see its name
        sys.exit(_USAGE_CODE)
    sys.exit(1)


@cache
def _command() -> Any:
    """All commands as click has them, built once a process: not for every command line that one process runs."""
    return get_command(app)


def _tell(sentence: str, *, code: str, as_json: bool) -> None:
    said = orjson.dumps({"error": {"code": code, "message": sentence}}).decode() if as_json else f"pagegate: {sentence}"
    typer.echo(said, err=True)
