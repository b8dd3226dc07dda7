"""`pagegate service-accounts`: programs that own keys. Thin: the deeds are tenancy/service_accounts.py's.

Keys are issued for one by `keys issue --service-account`; its role bounds what any of them may do.
"""

from typing import Annotated, Any

import typer

from api.cli.accounts import AccountId
from api.cli.session import AsJson, open_session, print_record, print_rows, time_text
from tenancy import service_accounts
from tenancy.accounts import ServiceAccount
from tenancy.roles import Role

app = typer.Typer(help="Add programs that own keys, and bound what their keys may do.", no_args_is_help=True)

ServiceAccountId = Annotated[str, typer.Argument(help="As `service-accounts list` shows it.", show_default=False)]
RoleName = Annotated[Role, typer.Argument(help="Any but owner.", show_default=False)]


@app.command("list")
def list_command(account_id: AccountId, *, as_json: AsJson = False) -> None:
    """List an account's service accounts."""
    with open_session() as session:
        rows = [_fields(one) for one in service_accounts.list_service_accounts(session.database, account_id)]
    print_rows("Service accounts", rows, columns=("id", "name", "role", "disabled"), as_json=as_json)


@app.command("add")
def add_command(
    account_id: AccountId,
    name: Annotated[str, typer.Argument(help="A name that no other service account of the account has.")],
    role: RoleName,
    *,
    as_json: AsJson = False,
) -> None:
    """Add a service account."""
    with open_session() as session:
        _print(service_accounts.add_service_account(session.database, account_id, name, role), as_json=as_json)


@app.command("set-role")
def set_role_command(
    account_id: AccountId, service_account_id: ServiceAccountId, role: RoleName, *, as_json: AsJson = False
) -> None:
    """Give a service account another role. Its keys lose what it does not allow within a second."""
    with open_session() as session:
        changed = service_accounts.change_service_account(session.database, account_id, service_account_id, role=role)
    _print(changed, as_json=as_json)


@app.command("disable")
def disable_command(account_id: AccountId, service_account_id: ServiceAccountId, *, as_json: AsJson = False) -> None:
    """Refuse all its keys, within a second, until it is enabled again."""
    _set_disabled(account_id, service_account_id, disabled=True, as_json=as_json)


@app.command("enable")
def enable_command(account_id: AccountId, service_account_id: ServiceAccountId, *, as_json: AsJson = False) -> None:
    """Accept its keys again."""
    _set_disabled(account_id, service_account_id, disabled=False, as_json=as_json)


def _set_disabled(account_id: str, service_account_id: str, *, disabled: bool, as_json: bool) -> None:
    with open_session() as session:
        changed = service_accounts.change_service_account(
            session.database, account_id, service_account_id, disabled=disabled
        )
    _print(changed, as_json=as_json)


def _fields(found: ServiceAccount) -> dict[str, Any]:
    return {
        "id": found.id,
        "account_id": found.account_id,
        "name": found.name,
        "role": found.role.value,
        "disabled": found.disabled,
        "created_at": time_text(found.created_at_ns),
    }


def _print(found: ServiceAccount, *, as_json: bool) -> None:
    print_record("Service account", _fields(found), as_json=as_json)
