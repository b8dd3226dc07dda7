"""Limits of rates and tokens: of an account, a project or a key, for one model or all.

Who may set and remove which is rule_setters.py's.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from tenancy.audit_log import COMMAND_LINE, Actor
from tenancy.claims import Meter
from tenancy.database import Database
from tenancy.errors import QuotaNotFound, ScopeMissing
from tenancy.provisioning.checks import ProvisioningInvalid, check_models
from tenancy.provisioning.deed_log import log
from tenancy.quotas import LIMIT_MAX, Quota
from tenancy.rule_setters import RuleSetter
from tenancy.store import QUOTAS_MAX, TenancyStore


def list_quotas(database: Database, account_id: str) -> list[Quota]:
    with database.read() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        return store.quotas(account_id)


def set_quota(
    database: Database,
    account_id: str,
    meter: Meter,
    limit: int,
    *,
    key_id: str | None = None,
    model: str | None = None,
    project_id: str | None = None,
    setter: RuleSetter = RuleSetter.OPERATOR,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> Quota:
    """Set a limit, in place of the setter's own for the same meter, project, key and model. It holds within a second.

    key_id: any key of a lineage; all of it share the limit. Raises AccountNotFound, KeyNotFound, ProjectNotFound,
    ProvisioningInvalid, and ScopeMissing where an account would limit itself as a whole.
    """
    if not 1 <= limit <= LIMIT_MAX:
        raise ProvisioningInvalid(f"A limit is 1 to {LIMIT_MAX}; suspend or disable to let nothing through.")
    if model is not None:
        check_models([model])
    with database.write() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        _refuse_whole_account(setter, key_id=key_id, project_id=project_id)
        quota = _quota(
            store, account_id, meter, limit, key_id=key_id, model=model, project_id=project_id, set_by=setter
        )
        store.set_quota(account_id, quota)
        if store.count_quotas(account_id) > QUOTAS_MAX:
            raise ProvisioningInvalid(f"An account has at most {QUOTAS_MAX} limits.")
        log(
            connection,
            clock,
            by,
            account_id,
            "limit.set",
            meter.value,
            limit=limit,
            **_told(quota),
        )
        return quota


def remove_quota(
    database: Database,
    account_id: str,
    meter: Meter,
    *,
    key_id: str | None = None,
    model: str | None = None,
    project_id: str | None = None,
    set_by: RuleSetter | None = None,
    remover: RuleSetter = RuleSetter.OPERATOR,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> None:
    """set_by: whose limit; None is the remover's own, or else the other's.

    Raises AccountNotFound, KeyNotFound, ProjectNotFound, QuotaNotFound, and ScopeMissing where an account would remove
    what an operator set.
    """
    with database.write() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        _refuse_whole_account(remover, key_id=key_id, project_id=project_id)
        like = _quota(store, account_id, meter, 1, key_id=key_id, model=model, project_id=project_id)
        for setter in (remover, remover.other) if set_by is None else (set_by,):
            quota = like if like.of_whole_account else replace(like, set_by=setter)
            if not store.remove_quota(account_id, quota):
                continue
            if not remover.may_remove(quota.set_by):
                raise ScopeMissing("This limit was set by the operator (operator:write), and is theirs to remove.")
            log(connection, clock, by, account_id, "limit.remove", meter.value, **_told(quota))
            return
        raise QuotaNotFound("There is no such limit.")


def _quota(
    store: TenancyStore,
    account_id: str,
    meter: Meter,
    limit: int,
    *,
    key_id: str | None,
    model: str | None,
    project_id: str | None,
    set_by: RuleSetter = RuleSetter.OPERATOR,
) -> Quota:
    if key_id is not None and project_id is not None:
        raise ProvisioningInvalid("A key is in one project already: name the key or the project.")
    if project_id is not None:
        store.project(account_id, project_id)
    lineage_id = None if key_id is None else store.key(account_id, key_id).lineage
    return Quota(meter, limit, key_id=lineage_id, model=model, project_id=project_id, set_by=set_by)


def _refuse_whole_account(setter: RuleSetter, *, key_id: str | None, project_id: str | None) -> None:
    if setter is RuleSetter.ACCOUNT and key_id is None and project_id is None:
        raise ScopeMissing(
            "A limit of the whole account is the operator's to set (operator:write): name a project or a key."
        )


def _told(quota: Quota) -> dict[str, str | None]:
    """What the audit log says of a limit, beside its meter and amount."""
    return {
        "key_id": quota.key_id,
        "model": quota.model,
        "project_id": quota.project_id,
        "set_by": quota.set_by.value,
    }
