"""`pagegate dashboard`: a link that signs in to the dashboard, once, within a quarter of an hour.

Whoever can run it owns the database already; it also serves who has forgotten a password.
"""

import time
from typing import Annotated

import typer

from api.cli.session import open_session
from api.settings import Settings, load_settings
from tenancy import people
from tenancy.audit_log import COMMAND_LINE
from tenancy.sign_in import make_sign_in_link


def dashboard_command(
    *,
    user: Annotated[
        str | None, typer.Option(help="The address of a user.", show_default="the first operator, made if need be")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Where the dashboard is reached.", show_default="host and port of the settings")
    ] = None,
) -> None:
    """Print a one-time link to the dashboard."""
    with open_session() as session:
        who = (
            people.dashboard_user(session.database, clock=time.time_ns)
            if user is None
            else people.find_user(session.database, user)
        )
        token = make_sign_in_link(session.database, who, by=COMMAND_LINE, clock=time.time_ns)
    typer.echo(f"{(base_url or _own_url(load_settings())).rstrip('/')}/dashboard/link/{token}")
    typer.echo(f"Signs in as {who.email}, once, within 15 minutes.", err=True)


def _own_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 - a comparison, not a bind
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
