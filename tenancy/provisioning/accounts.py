"""Open accounts, and set what one as a whole may do: its limits, plan, turns, regions and models."""

import time
from collections.abc import Callable, Iterable

from tenancy.accounts import TIER_MAX, WEIGHT_PERCENT_MAX, Account, new_account_id
from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.database import Database
from tenancy.provisioning.checks import ProvisioningInvalid, check_limits, check_models, check_name, check_regions
from tenancy.provisioning.deed_log import log
from tenancy.quotas import Plan
from tenancy.store import TenancyStore


def open_account(
    database: Database,
    name: str,
    *,
    concurrency: int | None = None,
    credit_limit_nano: int | None = None,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int],
) -> Account:
    """Raises NameTaken, ProvisioningInvalid."""
    with database.write() as connection:
        account = add_account(
            TenancyStore(connection),
            name,
            concurrency=concurrency,
            credit_limit_nano=credit_limit_nano,
            now_ns=clock(),
        )
        log(connection, clock, by, account.id, "account.open", account.id, name=name)
        return account


def set_limits(
    database: Database,
    account_id: str,
    *,
    concurrency: int | None,
    credit_limit_nano: int | None,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Account:
    """Replace both limits; None is no limit. Raises AccountNotFound, ProvisioningInvalid."""
    check_limits(concurrency, credit_limit_nano)
    with database.write() as connection:
        store = TenancyStore(connection)
        values = {"concurrency": concurrency, "credit_limit_nano": credit_limit_nano}
        store.update_account(account_id, **values)
        log(connection, clock, by, account_id, "account.set_limits", account_id, **values)
        return store.account(account_id)


def set_suspended(
    database: Database,
    account_id: str,
    *,
    suspended: bool,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Account:
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_account(account_id, suspended=suspended)
        log(connection, clock, by, account_id, "account.suspend" if suspended else "account.resume", account_id)
        return store.account(account_id)


def set_plan(
    database: Database,
    account_id: str,
    plan: Plan,
    *,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Account:
    """On the free plan a day ends at its free neurons; on the paid one what is above them is charged."""
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_account(account_id, plan=plan.value)
        log(connection, clock, by, account_id, "account.set_plan", account_id, plan=plan.value)
        return store.account(account_id)


def set_turns(
    database: Database,
    account_id: str,
    *,
    tier: int,
    weight_percent: int,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Account:
    """Whose requests wait behind whose, and how turns are shared within a tier. Raises ProvisioningInvalid."""
    if not 0 <= tier <= TIER_MAX:
        raise ProvisioningInvalid(f"A tier lies in 0..{TIER_MAX}; 0 goes first.")
    if not 1 <= weight_percent <= WEIGHT_PERCENT_MAX:
        raise ProvisioningInvalid(f"A weight lies in 1..{WEIGHT_PERCENT_MAX} percent.")
    with database.write() as connection:
        store = TenancyStore(connection)
        values = {"tier": tier, "weight_percent": weight_percent}
        store.update_account(account_id, **values)
        log(connection, clock, by, account_id, "account.set_turns", account_id, **values)
        return store.account(account_id)


def set_regions(
    database: Database,
    account_id: str,
    regions: Iterable[str] | None,
    *,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Account:
    """Where engines may see the account's prompts, within a second; None: anywhere. Raises ProvisioningInvalid."""
    words = None if regions is None else " ".join(check_regions(regions))
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_account(account_id, regions=words)
        log(connection, clock, by, account_id, "account.set_regions", account_id, regions=words)
        return store.account(account_id)


def set_models(
    database: Database,
    account_id: str,
    models: Iterable[str] | None,
    *,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Account:
    """All that any key of the account may use, within a second; None: any model. Raises ProvisioningInvalid."""
    chosen = None if models is None else check_models(models)
    with database.write() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        store.set_models(account_id, None, chosen)
        words = None if chosen is None else " ".join(chosen)
        log(connection, clock, by, account_id, "account.set_models", account_id, models=words)
        return store.account(account_id)


def list_accounts(database: Database) -> list[Account]:
    with database.read() as connection:
        return TenancyStore(connection).accounts()


def get_account(database: Database, account_id: str) -> Account:
    with database.read() as connection:
        return TenancyStore(connection).account(account_id)


def add_account(
    store: TenancyStore,
    name: str,
    *,
    concurrency: int | None,
    credit_limit_nano: int | None,
    now_ns: int,
) -> Account:
    """In the caller's transaction. Raises NameTaken, ProvisioningInvalid."""
    check_name(name)
    check_limits(concurrency, credit_limit_nano)
    account = Account(
        new_account_id(),
        name,
        now_ns,
        concurrency=concurrency,
        credit_limit_nano=credit_limit_nano,
    )
    store.add_account(account)
    return account
