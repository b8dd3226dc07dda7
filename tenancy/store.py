"""Queries of accounts and keys, inside a connection that the caller opened: one deed, one transaction.

Every method that belongs to an account takes its id first, and finds nothing of another's. Deeds use it; routes do not.
"""

from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from tenancy.accounts import Account
from tenancy.errors import AccountNotFound, KeyNotFound, NameTaken
from tenancy.keys import ApiKey, KeyKind
from tenancy.principal import Scope
from tenancy.tables import accounts, api_keys

_ACCOUNTS_LISTED_MAX = 10_000
_KEYS_LISTED_MAX = 10_000


class TenancyStore:
    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def add_account(self, account: Account) -> None:
        """Raises NameTaken: an account's name is how its operator tells it apart."""
        if self._connection.scalar(sa.select(accounts.c.id).where(accounts.c.name == account.name)) is not None:
            raise NameTaken(f"An account named {account.name!r} exists already.")
        self._connection.execute(accounts.insert(), asdict(account))

    def account(self, account_id: str) -> Account:
        row = self._connection.execute(sa.select(accounts).where(accounts.c.id == account_id)).mappings().first()
        if row is None:
            raise AccountNotFound("There is no such account.")
        return Account(**row)

    def accounts(self) -> list[Account]:
        query = sa.select(accounts).order_by(accounts.c.created_at_ns, accounts.c.id).limit(_ACCOUNTS_LISTED_MAX)
        return [Account(**row) for row in self._connection.execute(query).mappings()]

    def has_accounts(self) -> bool:
        return self._connection.scalar(sa.select(accounts.c.id).limit(1)) is not None

    def update_account(self, account_id: str, **values: Any) -> None:
        query = accounts.update().where(accounts.c.id == account_id).values(**values)
        if self._connection.execute(query).rowcount == 0:
            raise AccountNotFound("There is no such account.")

    def add_key(self, key: ApiKey) -> None:
        self._connection.execute(api_keys.insert(), _key_row(key))

    def key(self, account_id: str, key_id: str) -> ApiKey:
        """Raises KeyNotFound for an unknown key and for another account's alike."""
        query = sa.select(api_keys).where(api_keys.c.account_id == account_id, api_keys.c.id == key_id)
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise KeyNotFound("There is no such key in this account.")
        return _key(row)

    def keys(self, account_id: str) -> list[ApiKey]:
        query = (
            sa.select(api_keys)
            .where(api_keys.c.account_id == account_id)
            .order_by(api_keys.c.created_at_ns, api_keys.c.id)
            .limit(_KEYS_LISTED_MAX)
        )
        return [_key(row) for row in self._connection.execute(query).mappings()]

    def update_key(self, account_id: str, key_id: str, **values: Any) -> None:
        query = api_keys.update().where(api_keys.c.account_id == account_id, api_keys.c.id == key_id).values(**values)
        if self._connection.execute(query).rowcount == 0:
            raise KeyNotFound("There is no such key in this account.")

    def bearer(self, key_hash: str) -> tuple[ApiKey, Account] | None:
        """The key with this hash, and its account. The one query that starts from a secret and not from an account."""
        row = self._connection.execute(sa.select(api_keys).where(api_keys.c.key_hash == key_hash)).mappings().first()
        return None if row is None else (_key(row), self.account(row["account_id"]))


def _key_row(key: ApiKey) -> dict[str, Any]:
    return asdict(key) | {"kind": str(key.kind), "scopes": " ".join(sorted(key.scopes))}


def _key(row: sa.RowMapping) -> ApiKey:
    scopes = frozenset(Scope(word) for word in row["scopes"].split())
    return ApiKey(**{**row, "kind": KeyKind(row["kind"]), "scopes": scopes})
