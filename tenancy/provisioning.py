"""Opening accounts and issuing keys: each deed is one write transaction. Called by the command line and the console.

A key's text leaves this file once, in what `issue_key` returns; afterwards only its hash and its hint are known.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tenancy.accounts import NAME_CHARACTERS_MAX, Account, new_account_id
from tenancy.database import Database
from tenancy.keys import ALLOWED_SCOPES, ApiKey, KeyKind, hash_key, hint, new_key_id, new_key_text
from tenancy.principal import Scope
from tenancy.store import TenancyStore

_FIRST_ACCOUNT = "default"


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
        store = TenancyStore(connection)
        if store.has_accounts():
            return None
        account = _add_account(store, _FIRST_ACCOUNT, concurrency=None, credit_limit_nano=None, now_ns=clock())
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
    return Bootstrap(account, inference_key, admin_key)


def open_account(
    database: Database,
    name: str,
    *,
    concurrency: int | None = None,
    credit_limit_nano: int | None = None,
    clock: Callable[[], int],
) -> Account:
    """Raises NameTaken, ProvisioningInvalid."""
    with database.write() as connection:
        return _add_account(
            TenancyStore(connection),
            name,
            concurrency=concurrency,
            credit_limit_nano=credit_limit_nano,
            now_ns=clock(),
        )


def set_limits(
    database: Database, account_id: str, *, concurrency: int | None, credit_limit_nano: int | None
) -> Account:
    """Replace both limits; None is no limit. Raises AccountNotFound, ProvisioningInvalid."""
    _check_limits(concurrency, credit_limit_nano)
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_account(account_id, concurrency=concurrency, credit_limit_nano=credit_limit_nano)
        return store.account(account_id)


def set_suspended(database: Database, account_id: str, *, suspended: bool) -> Account:
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_account(account_id, suspended=suspended)
        return store.account(account_id)


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
    clock: Callable[[], int],
) -> IssuedKey:
    """Issue a key; without `scopes` it has all that its kind may have. The text is shown here and never again.

    Raises AccountNotFound, ProvisioningInvalid.
    """
    granted = ALLOWED_SCOPES[kind] if scopes is None else frozenset(scopes)
    with database.write() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        return _add_key(
            store, pepper, account_id, name=name, kind=kind, scopes=granted, expires_at_ns=expires_at_ns, now_ns=clock()
        )


def list_keys(database: Database, account_id: str) -> list[ApiKey]:
    with database.read() as connection:
        store = TenancyStore(connection)
        store.account(account_id)
        return store.keys(account_id)


def revoke_key(database: Database, account_id: str, key_id: str, *, clock: Callable[[], int]) -> ApiKey:
    """Revoke for good. Revoking again changes nothing: the first time stands."""
    with database.write() as connection:
        store = TenancyStore(connection)
        if store.key(account_id, key_id).revoked_at_ns is None:
            store.update_key(account_id, key_id, revoked_at_ns=clock())
        return store.key(account_id, key_id)


def set_key_disabled(database: Database, account_id: str, key_id: str, *, disabled: bool) -> ApiKey:
    """Disable for a while, or enable again. A revoked key stays revoked."""
    with database.write() as connection:
        store = TenancyStore(connection)
        store.update_key(account_id, key_id, disabled=disabled)
        return store.key(account_id, key_id)


def _add_account(
    store: TenancyStore,
    name: str,
    *,
    concurrency: int | None,
    credit_limit_nano: int | None,
    now_ns: int,
) -> Account:
    _check_name(name)
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
    now_ns: int,
) -> IssuedKey:
    _check_name(name)
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
    )
    store.add_key(key)
    return IssuedKey(key, text)


def _check_name(name: str) -> None:
    if not name.strip() or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise ProvisioningInvalid(f"A name is one line of 1 to {NAME_CHARACTERS_MAX} printable characters.")


def _check_limits(concurrency: int | None, credit_limit_nano: int | None) -> None:
    if concurrency is not None and not 1 <= concurrency < 2**31:
        raise ProvisioningInvalid("A concurrency limit is at least 1; suspend the account to let nothing through.")
    if credit_limit_nano is not None and not 0 <= credit_limit_nano < 2**63:
        raise ProvisioningInvalid("A credit limit is not negative, and at most about 9.2 billion USD.")
