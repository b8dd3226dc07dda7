"""Deeds on service accounts: programs that own keys, with a role that bounds what any of their keys may do.

Called by the command line and the console. Each deed is one write transaction with its audit entry.
"""

import time
from collections.abc import Callable

import sqlalchemy as sa

from tenancy import audit_log
from tenancy.accounts import ServiceAccount, new_service_account_id
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database
from tenancy.names import name_taken, taken_named
from tenancy.provisioning import ProvisioningInvalid, check_name
from tenancy.roles import Role
from tenancy.store import SERVICE_ACCOUNTS_MAX, TenancyStore


def list_service_accounts(database: Database, account_id: str) -> list[ServiceAccount]:
    """Oldest first. Raises AccountNotFound."""
    with database.read() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        return store.service_accounts(account_id)


def get_service_account(database: Database, account_id: str, service_account_id: str) -> ServiceAccount:
    """Raises ServiceAccountNotFound."""
    with database.read() as connection:
        return TenancyStore(connection).service_account(account_id, service_account_id)


def add_service_account(
    database: Database,
    account_id: str,
    name: str,
    role: Role,
    *,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> ServiceAccount:
    """Raises AccountNotFound, NameTaken, ProvisioningInvalid."""
    check_name(name)
    _check_role(role)
    with database.write() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        others = store.service_accounts(account_id)
        if len(others) >= SERVICE_ACCOUNTS_MAX:
            raise ProvisioningInvalid(f"An account has at most {SERVICE_ACCOUNTS_MAX} service accounts.")
        if any(other.name == name for other in others):
            raise name_taken("service account", name)
        added = ServiceAccount(new_service_account_id(), account_id, name, role, clock())
        with taken_named("service account", name):
            store.add_service_account(added)
        _log(connection, added, "service_account.add", by, clock, name=name, role=role.value)
        return added


def change_service_account(
    database: Database,
    account_id: str,
    service_account_id: str,
    *,
    role: Role | None = None,
    disabled: bool | None = None,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> ServiceAccount:
    """Give it another role, disable or enable it; None leaves things as they are. Its keys heed it within a second.

    Raises ServiceAccountNotFound, ProvisioningInvalid.
    """
    if role is not None:
        _check_role(role)
    with database.write() as connection:
        store = TenancyStore(connection)
        before = store.service_account(account_id, service_account_id)
        if role is not None and role is not before.role:
            store.update_service_account(account_id, service_account_id, role=role.value)
            _log(connection, before, "service_account.set_role", by, clock, role=role.value)
        if disabled is not None and disabled != before.disabled:
            store.update_service_account(account_id, service_account_id, disabled=disabled)
            _log(connection, before, "service_account.disable" if disabled else "service_account.enable", by, clock)
        return store.service_account(account_id, service_account_id)


def _check_role(role: Role) -> None:
    if role is Role.OWNER:
        raise ProvisioningInvalid("An account is owned by people: give a service account another role.")


def _log(
    connection: sa.Connection,
    subject: ServiceAccount,
    action: str,
    by: Actor,
    clock: Callable[[], int],
    **detail: str,
) -> None:
    audit_log.record(
        connection, at_ns=clock(), by=by, account_id=subject.account_id, action=action, subject=subject.id, **detail
    )
