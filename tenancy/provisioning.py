"""Opening accounts, setting limits, issuing and rotating keys: each deed is one write transaction.

Called by the command line, the console and the dashboard. Each deed writes who did it into the audit log (`by`), as the
last thing of its transaction.

A key's text leaves this file once, in what `issue_key` returns; afterwards only its hash and its hint are known.
"""

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from ipaddress import ip_network

import sqlalchemy as sa

from tenancy import audit_log
from tenancy.accounts import NAME_CHARACTERS_MAX, TIER_MAX, WEIGHT_PERCENT_MAX, Account, new_account_id
from tenancy.audit_log import COMMAND_LINE, SERVICE, Actor
from tenancy.claims import Meter
from tenancy.database import Database, let_one_pass
from tenancy.errors import QuotaNotFound, ScopeMissing
from tenancy.keys import ALLOWED_SCOPES, USUAL_SCOPES, ApiKey, KeyKind, hash_key, hint, new_key_id, new_key_text
from tenancy.principal import Network, Scope
from tenancy.quotas import LIMIT_MAX, Plan, Quota
from tenancy.roles import SCOPES
from tenancy.rule_setters import RuleSetter
from tenancy.store import QUOTAS_MAX, TenancyStore

_FIRST_ACCOUNT = "default"
_NS = 1_000_000_000
LIST_MAX = 100
# The last instant that databases can hold, in the year 2262.
_INSTANT_NS_MAX = 2**63 - 1
REGION_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
MODEL_ID = re.compile(r"[!-~]{1,200}", re.ASCII)
GRACE_S_MAX = 30 * 86_400


class ProvisioningInvalid(ValueError):
    """A name, limit, scope or expiry that can't be; the message says which and why."""


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key and its text, which nobody can read again."""

    key: ApiKey
    text: str

    def __repr__(self) -> str:  # a text in a log or a traceback would be a leak
        return f"IssuedKey({self.key.id})"


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What a first start made: one account and its two keys."""

    account: Account
    inference_key: IssuedKey
    admin_key: IssuedKey


def bootstrap(database: Database, pepper: bytes, *, clock: Callable[[], int]) -> Bootstrap | None:
    """Open the first account with an inference and an admin key; None if there is an account already."""
    with database.write() as connection:
        let_one_pass(connection)
        store = TenancyStore(connection)
        if store.has_accounts():
            return None
        account = _add_account(store, _FIRST_ACCOUNT, concurrency=None, credit_limit_nano=None, now_ns=clock())
        _log(connection, clock, SERVICE, account.id, "account.open", account.id, name=account.name)
        inference_key, admin_key = (
            _add_key(
                store,
                pepper,
                account.id,
                name=f"first {kind} key",
                kind=kind,
                scopes=ALLOWED_SCOPES[kind],
                now_ns=clock(),
            )
            for kind in (KeyKind.INFERENCE, KeyKind.ADMIN)
        )
        for issued in (inference_key, admin_key):
            _log(connection, clock, SERVICE, account.id, "key.issue", issued.key.id, **_told(issued.key))
    return Bootstrap(account, inference_key, admin_key)


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
        account = _add_account(
            TenancyStore(connection),
            name,
            concurrency=concurrency,
            credit_limit_nano=credit_limit_nano,
            now_ns=clock(),
        )
        _log(connection, clock, by, account.id, "account.open", account.id, name=name)
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
    _check_limits(concurrency, credit_limit_nano)
    with database.write() as connection:
        store = TenancyStore(connection)
        values = {"concurrency": concurrency, "credit_limit_nano": credit_limit_nano}
        store.update_account(account_id, **values)
        _log(connection, clock, by, account_id, "account.set_limits", account_id, **values)
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
        _log(connection, clock, by, account_id, "account.suspend" if suspended else "account.resume", account_id)
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
        _log(connection, clock, by, account_id, "account.set_plan", account_id, plan=plan.value)
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
        _log(connection, clock, by, account_id, "account.set_turns", account_id, **values)
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
    words = None if regions is None else " ".join(_regions(regions))
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_account(account_id, regions=words)
        _log(connection, clock, by, account_id, "account.set_regions", account_id, regions=words)
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
        _log(connection, clock, by, account_id, "account.set_models", account_id, models=words)
        return store.account(account_id)


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
        _log(
            connection,
            clock,
            by,
            account_id,
            "limit.set",
            meter.value,
            limit=limit,
            **_told_of(quota),
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
            _log(connection, clock, by, account_id, "limit.remove", meter.value, **_told_of(quota))
            return
        raise QuotaNotFound("There is no such limit.")


def list_accounts(database: Database) -> list[Account]:
    with database.read() as connection:
        return TenancyStore(connection).accounts()


def get_account(database: Database, account_id: str) -> Account:
    with database.read() as connection:
        return TenancyStore(connection).account(account_id)


def issue_key(
    database: Database,
    pepper: bytes,
    account_id: str,
    *,
    name: str,
    kind: KeyKind,
    scopes: Iterable[Scope] | None = None,
    expires_at_ns: int | None = None,
    models: Iterable[str] | None = None,
    networks: Iterable[str] | None = None,
    project_id: str | None = None,
    service_account_id: str | None = None,
    at_most: frozenset[Scope] | None = None,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int],
) -> IssuedKey:
    """Issue a key; without `scopes` it has all of `at_most` that its kind and owner may have, but for an operator's.
    The text is shown here and never again.

    models, networks: all that it may use, and from where (CIDR); None: no such bound. project_id: None for the default
    one. service_account_id: the program that owns it. Raises AccountNotFound, ProjectNotFound, ServiceAccountNotFound,
    ProvisioningInvalid.
    """
    with database.write() as connection:
        store = TenancyStore(connection)
        project = store.project(account_id, project_id or account_id)
        if project.archived_at_ns is not None:
            raise ProvisioningInvalid("The project is archived.")
        grantable = USUAL_SCOPES[kind] if at_most is None else USUAL_SCOPES[kind] & at_most
        if service_account_id is not None:
            role = store.service_account(account_id, service_account_id).role
            grantable &= SCOPES[role]
            if scopes is not None and not frozenset(scopes) <= SCOPES[role]:
                raise ProvisioningInvalid(f"A service account that is a {role} has no such scopes.")
        if not grantable:
            raise ProvisioningInvalid(f"Nothing is left that such an {kind} key may do.")
        issued = _add_key(
            store,
            pepper,
            account_id,
            name=name,
            kind=kind,
            scopes=grantable if scopes is None else frozenset(scopes),
            service_account_id=service_account_id,
            project_id=None if project.id == account_id else project.id,
            expires_at_ns=expires_at_ns,
            models=None if models is None else check_models(models),
            networks=None if networks is None else _networks(networks),
            now_ns=clock(),
        )
        _log(connection, clock, by, account_id, "key.issue", issued.key.id, **_told(issued.key))
        return issued


def rotate_key(
    database: Database,
    pepper: bytes,
    account_id: str,
    key_id: str,
    *,
    grace_s: int,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int],
) -> IssuedKey:
    """Issue a key in place of another, which goes on working for `grace_s`, and never past its own expiry.

    The new one may do what the old one may, for as long as that could from its issue on, and shares its limits.
    Raises KeyNotFound, ProvisioningInvalid.
    """
    if not 0 <= grace_s <= GRACE_S_MAX:
        raise ProvisioningInvalid(f"A grace period is 0 to {GRACE_S_MAX} seconds.")
    now_ns = clock()
    with database.write() as connection:
        store = TenancyStore(connection)
        old = store.key(account_id, key_id)
        ended = old.expires_at_ns is not None and old.expires_at_ns <= now_ns
        if old.revoked_at_ns is not None or old.disabled or ended:
            raise ProvisioningInvalid("Only a key that works can be rotated.")
        grace_ends_ns = now_ns + grace_s * _NS
        store.update_key(account_id, key_id, expires_at_ns=min(old.expires_at_ns or grace_ends_ns, grace_ends_ns))
        lasts_ns = None if old.expires_at_ns is None else old.expires_at_ns - old.created_at_ns
        issued = _add_key(
            store,
            pepper,
            account_id,
            name=old.name,
            kind=old.kind,
            scopes=old.scopes,
            expires_at_ns=None if lasts_ns is None else min(now_ns + lasts_ns, _INSTANT_NS_MAX),
            models=old.models,
            networks=old.networks,
            lineage_id=old.lineage,
            project_id=old.project_id,
            service_account_id=old.service_account_id,
            now_ns=now_ns,
        )
        _log(connection, clock, by, account_id, "key.rotate", key_id, successor=issued.key.id, grace_s=grace_s)
        return issued


def list_keys(database: Database, account_id: str) -> list[ApiKey]:
    with database.read() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        return store.keys(account_id)


def get_key(database: Database, account_id: str, key_id: str) -> ApiKey:
    with database.read() as connection:
        return TenancyStore(connection).key(account_id, key_id)


def revoke_key(
    database: Database, account_id: str, key_id: str, *, by: Actor = COMMAND_LINE, clock: Callable[[], int]
) -> ApiKey:
    """Revoke for good. Revoking again changes nothing: the first time stands."""
    with database.write() as connection:
        store = TenancyStore(connection)
        if store.key(account_id, key_id).revoked_at_ns is None:
            store.update_key(account_id, key_id, revoked_at_ns=clock())
            _log(connection, clock, by, account_id, "key.revoke", key_id)
        return store.key(account_id, key_id)


def set_key_disabled(
    database: Database,
    account_id: str,
    key_id: str,
    *,
    disabled: bool,
    by: Actor = COMMAND_LINE,
    clock: Callable[[], int] = time.time_ns,
) -> ApiKey:
    """Disable for a while, or enable again. A revoked key stays revoked."""
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_key(account_id, key_id, disabled=disabled)
        _log(connection, clock, by, account_id, "key.disable" if disabled else "key.enable", key_id)
        return store.key(account_id, key_id)


def _log(  # noqa: PLR0917 - who, whose, what, to what: always in this order
    connection: sa.Connection,
    clock: Callable[[], int],
    by: Actor,
    account_id: str,
    action: str,
    subject: str,
    **detail: str | int | bool | None,
) -> None:
    audit_log.record(connection, at_ns=clock(), by=by, account_id=account_id, action=action, subject=subject, **detail)


def _told(key: ApiKey) -> dict[str, str]:
    """What the audit log may know of a key."""
    told = {"name": key.name, "kind": key.kind.value, "hint": key.hint, "scopes": " ".join(sorted(key.scopes))}
    ids = {"project_id": key.project_id, "service_account_id": key.service_account_id}
    return told | {name: value for name, value in ids.items() if value is not None}


def _add_account(
    store: TenancyStore,
    name: str,
    *,
    concurrency: int | None,
    credit_limit_nano: int | None,
    now_ns: int,
) -> Account:
    check_name(name)
    _check_limits(concurrency, credit_limit_nano)
    account = Account(
        new_account_id(),
        name,
        now_ns,
        concurrency=concurrency,
        credit_limit_nano=credit_limit_nano,
    )
    store.add_account(account)
    return account


def _add_key(
    store: TenancyStore,
    pepper: bytes,
    account_id: str,
    *,
    name: str,
    kind: KeyKind,
    scopes: frozenset[Scope],
    expires_at_ns: int | None = None,
    models: tuple[str, ...] | None = None,
    networks: tuple[Network, ...] | None = None,
    lineage_id: str | None = None,
    project_id: str | None = None,
    service_account_id: str | None = None,
    now_ns: int,
) -> IssuedKey:
    check_name(name)
    if not scopes or not scopes <= ALLOWED_SCOPES[kind]:
        raise ProvisioningInvalid(f"An {kind} key can have these scopes: {', '.join(sorted(ALLOWED_SCOPES[kind]))}.")
    if expires_at_ns is not None and expires_at_ns <= now_ns:
        raise ProvisioningInvalid("The expiry has passed already.")
    text = new_key_text(kind)
    key = ApiKey(
        id=new_key_id(),
        account_id=account_id,
        name=name,
        kind=kind,
        key_hash=hash_key(text, pepper),
        hint=hint(text),
        scopes=scopes,
        created_at_ns=now_ns,
        expires_at_ns=expires_at_ns,
        models=models,
        networks=networks,
        lineage_id=lineage_id,
        project_id=project_id,
        service_account_id=service_account_id,
    )
    store.add_key(key)
    return IssuedKey(key, text)


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


def _told_of(quota: Quota) -> dict[str, str | None]:
    """What the audit log says of a limit, beside its meter and amount."""
    return {
        "key_id": quota.key_id,
        "model": quota.model,
        "project_id": quota.project_id,
        "set_by": quota.set_by.value,
    }


def check_models(models: Iterable[str]) -> tuple[str, ...]:
    """Each once. Raises ProvisioningInvalid. Whether it is served now does not matter: lists outlive deployments."""
    found = tuple(dict.fromkeys(models))
    if not 1 <= len(found) <= LIST_MAX:
        raise ProvisioningInvalid(f"A list of models has 1 to {LIST_MAX} entries.")
    for model in found:
        if MODEL_ID.fullmatch(model) is None:
            raise ProvisioningInvalid("A model's id has 1 to 200 characters, without spaces.")
    return found


def _regions(regions: Iterable[str]) -> tuple[str, ...]:
    found = tuple(sorted(set(regions)))
    if not 1 <= len(found) <= LIST_MAX:
        raise ProvisioningInvalid(f"A list of regions has 1 to {LIST_MAX} entries.")
    for region in found:
        if REGION_NAME.fullmatch(region) is None:
            raise ProvisioningInvalid(f"{region!r} is no name of a region: a-z, 0-9 and hyphens, at most 63.")
    return found


def _networks(networks: Iterable[str]) -> tuple[Network, ...]:
    texts = tuple(dict.fromkeys(networks))
    if not 1 <= len(texts) <= LIST_MAX:
        raise ProvisioningInvalid(f"A list of networks has 1 to {LIST_MAX} entries.")
    try:
        return tuple(map(ip_network, texts))
    except ValueError as error:
        raise ProvisioningInvalid(f"Not a network: {error}; write 192.0.2.0/24 or 2001:db8::/32.") from error


def check_name(name: str) -> None:
    """Raises ProvisioningInvalid. Accounts, keys and projects are named alike."""
    if not name.strip() or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise ProvisioningInvalid(f"A name is one line of 1 to {NAME_CHARACTERS_MAX} printable characters.")


def _check_limits(concurrency: int | None, credit_limit_nano: int | None) -> None:
    if concurrency is not None and not 1 <= concurrency < 2**31:
        raise ProvisioningInvalid("A concurrency limit is at least 1; suspend the account to let nothing through.")
    if credit_limit_nano is not None and not 0 <= credit_limit_nano < 2**63:
        raise ProvisioningInvalid("A credit limit is not negative, and at most about 9.2 billion USD.")
