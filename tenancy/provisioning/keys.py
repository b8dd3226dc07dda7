"""Issue keys, and rotate, disable and revoke them.

A key's text leaves this file once, in what `issue_key` returns; afterwards only its hash and its hint are known.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tenancy.audit_log import COMMAND_LINE, Actor, wait_turn
from tenancy.database import Database
from tenancy.keys import ALLOWED_SCOPES, USUAL_SCOPES, ApiKey, KeyKind, hash_key, hint, new_key_id, new_key_text
from tenancy.people_store import PeopleStore
from tenancy.principal import Network, Scope
from tenancy.provisioning.checks import ProvisioningInvalid, check_models, check_name, check_networks
from tenancy.provisioning.deed_log import log
from tenancy.roles import SCOPES
from tenancy.store import TenancyStore

_NS = 1_000_000_000
# The last instant that databases can hold, in the year 2262.
_INSTANT_NS_MAX = 2**63 - 1
GRACE_S_MAX = 30 * 86_400


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key and its text, which nobody can read again."""

    key: ApiKey
    text: str

    def __repr__(self) -> str:  # a text in a log or a traceback would be a leak
        return f"IssuedKey({self.key.id})"


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
        issued = add_key(
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
            networks=None if networks is None else check_networks(networks),
            now_ns=clock(),
        )
        log(connection, clock, by, account_id, "key.issue", issued.key.id, **told(issued.key))
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
        issued = add_key(
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
        log(connection, clock, by, account_id, "key.rotate", key_id, successor=issued.key.id, grace_s=grace_s)
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
    """Revoke for good. Revoking again changes nothing: the first time stands.

    Whoever had a key that administers may have invited themselves: with it the account's open invitations end.
    """
    with database.write() as connection:
        wait_turn(connection)  # before any row is held that one who has the turn may want
        store = TenancyStore(connection)
        key = store.key(account_id, key_id)
        if key.revoked_at_ns is None:
            store.update_key(account_id, key_id, revoked_at_ns=clock())
            if Scope.ACCOUNT_ADMIN in key.scopes:
                PeopleStore(connection).end_invitations(account_id)
            log(connection, clock, by, account_id, "key.revoke", key_id)
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
        log(connection, clock, by, account_id, "key.disable" if disabled else "key.enable", key_id)
        return store.key(account_id, key_id)


def add_key(
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
    """In the caller's transaction. Raises ProvisioningInvalid."""
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


def told(key: ApiKey) -> dict[str, str]:
    """What the audit log may know of a key."""
    told = {"name": key.name, "kind": key.kind.value, "hint": key.hint, "scopes": " ".join(sorted(key.scopes))}
    ids = {"project_id": key.project_id, "service_account_id": key.service_account_id}
    return told | {name: value for name, value in ids.items() if value is not None}
