"""Queries of accounts, projects, keys and quotas, in a connection that the caller opened: one deed, one transaction.

Every method that belongs to an account takes its id first, and finds nothing of another's. Deeds use it; routes do not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from ipaddress import ip_network
from typing import Any

import sqlalchemy as sa

from tenancy.accounts import Account, Project, ServiceAccount, default_project
from tenancy.claims import Meter
from tenancy.errors import AccountNotFound, KeyNotFound, NameTaken, ProjectNotFound, ServiceAccountNotFound
from tenancy.keys import ApiKey, KeyKind
from tenancy.principal import Scope
from tenancy.quotas import Plan, Quota
from tenancy.roles import Role
from tenancy.rule_setters import RuleSetter
from tenancy.tables import accounts, api_keys, model_lists, projects, quotas, service_accounts

_ACCOUNTS_LISTED_MAX = 10_000
_KEYS_LISTED_MAX = 10_000
PROJECTS_MAX = 1_000
SERVICE_ACCOUNTS_MAX = 1_000
QUOTAS_MAX = 200  # of one account: each that matches is looked at by every request
_WHOLE_ACCOUNT = ""


def _name_taken(name: str) -> NameTaken:
    return NameTaken(f"An account named {name!r} exists already.")


@dataclass(frozen=True, slots=True)
class Bearer:
    """Whom a key's text belongs to, and what applies to them."""

    key: ApiKey
    account: Account
    project: Project
    quotas: tuple[Quota, ...]
    service_account: ServiceAccount | None = None


class TenancyStore:
    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def add_account(self, account: Account) -> None:
        """Raises NameTaken: an account's name is how its operator tells it apart."""
        if self._connection.scalar(sa.select(accounts.c.id).where(accounts.c.name == account.name)) is not None:
            raise _name_taken(account.name)
        try:
            row = _fields(account) | {"plan": account.plan.value, "regions": _words(account.regions)}
            lists = {None: row.pop("models"), account.id: row.pop("default_project_models")}
            self._connection.execute(accounts.insert(), row)
        except sa.exc.IntegrityError as error:  # another process took it in between
            raise _name_taken(account.name) from error
        for project_id, models in lists.items():
            self.set_models(account.id, project_id, models)

    def account(self, account_id: str) -> Account:
        row = (
            self._connection.execute(sa.select(accounts, *_ACCOUNTS_LISTS).where(accounts.c.id == account_id))
            .mappings()
            .first()
        )
        if row is None:
            raise AccountNotFound("There is no such account.")
        return _account(row)

    def accounts(self) -> list[Account]:
        query = (
            sa.select(accounts, *_ACCOUNTS_LISTS)
            .order_by(accounts.c.created_at_ns, accounts.c.id)
            .limit(_ACCOUNTS_LISTED_MAX)
        )
        return [_account(row) for row in self._connection.execute(query).mappings()]

    def has_accounts(self) -> bool:
        return self._connection.scalar(sa.select(accounts.c.id).limit(1)) is not None

    def update_account(self, account_id: str, **values: Any) -> None:
        query = accounts.update().where(accounts.c.id == account_id).values(**values)
        if self._connection.execute(query).rowcount == 0:
            raise AccountNotFound("There is no such account.")

    def add_project(self, project: Project) -> None:
        """Raises NameTaken."""
        row = _fields(project)
        models = row.pop("models")
        self._connection.execute(projects.insert(), row)
        self.set_models(project.account_id, project.id, models)

    def project(self, account_id: str, project_id: str) -> Project:
        """Raises ProjectNotFound for an unknown project and for another account's alike."""
        if project_id == account_id:
            return default_project(self.account(account_id))
        query = sa.select(projects, _PROJECTS_LIST).where(
            projects.c.account_id == account_id, projects.c.id == project_id
        )
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise ProjectNotFound("There is no such project in this account.")
        return _project(row)

    def projects(self, account_id: str) -> list[Project]:
        """The default one first, then the oldest."""
        query = (
            sa.select(projects, _PROJECTS_LIST)
            .where(projects.c.account_id == account_id)
            .order_by(projects.c.created_at_ns, projects.c.id)
            .limit(PROJECTS_MAX)
        )
        first = default_project(self.account(account_id))
        return [first, *(_project(row) for row in self._connection.execute(query).mappings())]

    def update_project(self, account_id: str, project_id: str, **values: Any) -> None:
        query = projects.update().where(projects.c.account_id == account_id, projects.c.id == project_id)
        if self._connection.execute(query.values(**values)).rowcount == 0:
            raise ProjectNotFound("There is no such project in this account.")

    def set_models(self, account_id: str, project_id: str | None, models: tuple[str, ...] | None) -> None:
        """What a project's keys may use at most, or with None all of the account's; no list: any model."""
        part = _WHOLE_ACCOUNT if project_id is None else project_id
        mine = sa.and_(model_lists.c.account_id == account_id, model_lists.c.project_id == part)
        self._connection.execute(model_lists.delete().where(mine))
        if models is not None:
            row = {"account_id": account_id, "project_id": part, "models": _words(models)}
            self._connection.execute(model_lists.insert(), row)

    def add_service_account(self, service_account: ServiceAccount) -> None:
        row = _fields(service_account) | {"role": service_account.role.value}
        self._connection.execute(service_accounts.insert(), row)

    def service_account(self, account_id: str, service_account_id: str) -> ServiceAccount:
        """Raises ServiceAccountNotFound for an unknown one and for another account's alike."""
        query = sa.select(service_accounts).where(
            service_accounts.c.account_id == account_id, service_accounts.c.id == service_account_id
        )
        row = self._connection.execute(query).mappings().first()
        if row is None:
            raise ServiceAccountNotFound("There is no such service account in this account.")
        return _service_account(row)

    def service_accounts(self, account_id: str) -> list[ServiceAccount]:
        """Oldest first."""
        of_account = service_accounts.c.account_id == account_id
        query = sa.select(service_accounts).where(of_account).limit(SERVICE_ACCOUNTS_MAX)
        query = query.order_by(service_accounts.c.created_at_ns, service_accounts.c.id)
        return [_service_account(row) for row in self._connection.execute(query).mappings()]

    def update_service_account(self, account_id: str, service_account_id: str, **values: Any) -> None:
        query = service_accounts.update().where(
            service_accounts.c.account_id == account_id, service_accounts.c.id == service_account_id
        )
        if self._connection.execute(query.values(**values)).rowcount == 0:
            raise ServiceAccountNotFound("There is no such service account in this account.")

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

    def bearer(self, key_hash: str) -> Bearer | None:
        """The key with this hash, and its account. The one query that starts from a secret and not from an account."""
        row = self._connection.execute(sa.select(api_keys).where(api_keys.c.key_hash == key_hash)).mappings().first()
        if row is None:
            return None
        return self.bearer_of(_key(row))

    def bearer_of(self, key: ApiKey) -> Bearer:
        account_id = key.account_id
        account = self.account(account_id)
        project = default_project(account) if key.project_id is None else self.project(account_id, key.project_id)
        owner_id = key.service_account_id
        owner = None if owner_id is None else self.service_account(account_id, owner_id)
        return Bearer(key, account, project, tuple(self.quotas(account_id)), owner)

    def note_use(self, account_id: str, key_id: str, used_at_ns: int) -> None:
        """When a key was last used: never earlier than is known already."""
        earlier = sa.or_(api_keys.c.last_used_at_ns.is_(None), api_keys.c.last_used_at_ns < used_at_ns)
        mine = sa.and_(api_keys.c.account_id == account_id, api_keys.c.id == key_id)
        self._connection.execute(api_keys.update().where(mine, earlier).values(last_used_at_ns=used_at_ns))

    def quotas(self, account_id: str) -> list[Quota]:
        query = (
            sa.select(quotas)
            .where(quotas.c.account_id == account_id)
            .order_by(quotas.c.project_id, quotas.c.key_id, quotas.c.model, quotas.c.meter, quotas.c.set_by)
            .limit(QUOTAS_MAX)
        )
        return [_quota(row) for row in self._connection.execute(query).mappings()]

    def count_quotas(self, account_id: str) -> int:
        query = sa.select(sa.func.count()).select_from(quotas).where(quotas.c.account_id == account_id)
        return self._connection.scalar(query) or 0

    def set_quota(self, account_id: str, quota: Quota) -> None:
        """In place of one for the same project, key, model and meter that the same one set."""
        self.remove_quota(account_id, quota)
        row = {"account_id": account_id, "meter": quota.meter.value, "limit_amount": quota.limit}
        self._connection.execute(quotas.insert(), row | _bounds(quota) | {"set_by": quota.set_by.value})

    def remove_quota(self, account_id: str, like: Quota) -> bool:
        """Whatever its limit is. False if there was none."""
        same = [quotas.c[name] == value for name, value in _bounds(like).items()]
        if not like.of_whole_account:  # that is the operator's, whatever its row says
            same.append(quotas.c.set_by == like.set_by.value)
        query = quotas.delete().where(quotas.c.account_id == account_id, quotas.c.meter == like.meter.value, *same)
        return self._connection.execute(query).rowcount > 0


def _models_of(account_id: Any, project_id: Any) -> sa.Select[str]:
    same = (model_lists.c.account_id == account_id, model_lists.c.project_id == project_id)
    return sa.select(model_lists.c.models).where(*same)


_ACCOUNTS_LISTS = (
    _models_of(accounts.c.id, _WHOLE_ACCOUNT).scalar_subquery().label("models"),
    _models_of(accounts.c.id, accounts.c.id).scalar_subquery().label("default_project_models"),
)
_PROJECTS_LIST = _models_of(projects.c.account_id, projects.c.id).scalar_subquery().label("models")


def _fields(record: Account | ApiKey | Project | ServiceAccount) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _account(row: sa.RowMapping) -> Account:
    lists = {name: _list(row[name]) for name in ("regions", "models", "default_project_models")}
    return Account(**{**row, "plan": Plan(row["plan"]), **lists})


def _project(row: sa.RowMapping) -> Project:
    return Project(**{**row, "models": _list(row["models"])})


def _service_account(row: sa.RowMapping) -> ServiceAccount:
    return ServiceAccount(**{**row, "role": Role(row["role"])})


def _key_row(key: ApiKey) -> dict[str, Any]:
    return _fields(key) | {
        "kind": str(key.kind),
        "scopes": " ".join(sorted(key.scopes)),
        "models": _words(key.models),
        "networks": _words(key.networks),
    }


def _key(row: sa.RowMapping) -> ApiKey:
    return ApiKey(
        **{
            **row,
            "kind": KeyKind(row["kind"]),
            "scopes": frozenset(Scope(word) for word in row["scopes"].split()),
            "models": _list(row["models"]),
            "networks": None if row["networks"] is None else tuple(map(ip_network, row["networks"].split())),
        }
    )


def _words(values: Iterable[object] | None) -> str | None:
    return None if values is None else " ".join(map(str, values))


def _list(words: str | None) -> tuple[str, ...] | None:
    return None if words is None else tuple(words.split())


def _bounds(quota: Quota) -> dict[str, str]:
    """What a limit is about, as its row has it: empty for all together."""
    return {"project_id": quota.project_id or "", "key_id": quota.key_id or "", "model": quota.model or ""}


def _quota(row: sa.RowMapping) -> Quota:
    whole = not row["key_id"] and not row["project_id"]
    return Quota(
        Meter(row["meter"]),
        row["limit_amount"],
        key_id=row["key_id"] or None,
        model=row["model"] or None,
        project_id=row["project_id"] or None,
        set_by=RuleSetter.OPERATOR if whole else RuleSetter(row["set_by"]),
    )
