"""What a first start makes: one account and its two keys, so that somebody can begin."""

from collections.abc import Callable
from dataclasses import dataclass

from tenancy.accounts import Account
from tenancy.audit_log import SERVICE
from tenancy.database import Database, let_one_pass
from tenancy.keys import ALLOWED_SCOPES, KeyKind
from tenancy.provisioning.accounts import add_account
from tenancy.provisioning.deed_log import log
from tenancy.provisioning.keys import IssuedKey, add_key, told
from tenancy.store import TenancyStore

_FIRST_ACCOUNT = "default"


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
        account = add_account(store, _FIRST_ACCOUNT, concurrency=None, credit_limit_nano=None, now_ns=clock())
        log(connection, clock, SERVICE, account.id, "account.open", account.id, name=account.name)
        inference_key, admin_key = (
            add_key(
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
            log(connection, clock, SERVICE, account.id, "key.issue", issued.key.id, **told(issued.key))
    return Bootstrap(account, inference_key, admin_key)
