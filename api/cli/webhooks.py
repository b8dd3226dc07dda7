"""`pagegate webhooks`: where an account's alerts and invoices are announced. Thin: billing/webhooks/endpoints.py's."""

import time
from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, Session, open_session, print_record, print_rows, time_text
from api.settings import load_settings
from billing.webhooks.endpoints import Endpoint, Endpoints
from tenancy import provisioning

app = typer.Typer(help="Add, list and remove webhook endpoints.", no_args_is_help=True)


@app.command("add")
def add_command(
    account_id: AccountId,
    url: Annotated[str, typer.Argument(help="https://…", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Send an account's alerts and invoices to a URL. The secret that signs them is printed once."""
    with open_session() as session:
        added = _endpoints(session, account_id).add(account_id, url)
    print_record("Webhook", _record(added.endpoint) | {"secret": added.secret}, as_json=as_json)


@app.command("list")
def list_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """List an account's endpoints, and how many messages wait for each."""
    with open_session() as session:
        rows = [_record(endpoint) for endpoint in _endpoints(session, account_id).all_of(account_id)]
    print_rows("Webhooks", rows, columns=("id", "url", "created_at", "waiting"), as_json=as_json)


@app.command("remove")
def remove_command(
    account_id: AccountId,
    endpoint_id: Annotated[str, typer.Argument(help="Of an endpoint in the list.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Remove an endpoint; what waits for it is dropped."""
    with open_session() as session:
        _endpoints(session, account_id).remove(account_id, endpoint_id)
    print_record("Removed", {"id": endpoint_id}, as_json=as_json)


def _endpoints(session: Session, account_id: str) -> Endpoints:
    provisioning.get_account(session.database, account_id)
    allowed = load_settings().billing.webhook_addresses()
    return Endpoints(session.database, allowed=allowed, clock=time.time_ns)


def _record(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "url": endpoint.url,
        "created_at": time_text(endpoint.created_at_ns),
        "waiting": endpoint.waiting,
    }
