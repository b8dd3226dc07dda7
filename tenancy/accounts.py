"""An account: who pays, what it may take, its projects and programs. Plain values; store.py keeps them."""

import re
import secrets
from dataclasses import dataclass

from tenancy.quotas import Plan
from tenancy.roles import Role

_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}")
NAME_CHARACTERS_MAX = 100
TIER_MAX = 9
WEIGHT_PERCENT_MAX = 10_000
DEFAULT_PROJECT_NAME = "default"


@dataclass(frozen=True, slots=True)
class Account:
    """id: 32 lower-case hex. concurrency: requests at once, credit_limit_nano: nano-USD in all; None is no limit.

    tier: whose turn is before whose, 0 first. weight_percent: its part of the turns within the tier, 100 as most.
    regions: where its prompts may go, whatever else; None is anywhere. models: all that any of its keys may use; None
    is any. default_project_models: all that those of its default project may.
    """

    id: str
    name: str
    created_at_ns: int
    suspended: bool = False
    concurrency: int | None = None
    credit_limit_nano: int | None = None
    plan: Plan = Plan.PAID
    tier: int = 0
    weight_percent: int = 100
    regions: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    default_project_models: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        assert is_account_id(self.id), f"not an account id: {self.id!r}"
        assert self.concurrency is None or self.concurrency >= 1, "no concurrency at all is a suspension"
        assert 0 <= self.tier <= TIER_MAX, "a tier is a small number"
        assert 1 <= self.weight_percent <= WEIGHT_PERCENT_MAX, "no weight at all is a suspension"
        assert self.regions is None or self.regions, "nowhere at all is a suspension"
        assert self.models is None or self.models, "no model at all is a suspension"
        assert self.credit_limit_nano is None or self.credit_limit_nano >= 0, "a credit limit is not negative"


@dataclass(frozen=True, slots=True)
class Project:
    """A part of an account that its keys belong to, with limits, budgets and usage of its own.

    Every account has a default one, whose id is the account's; keys that were issued without a project are in it.
    archived_at_ns: since when its keys are refused. models: all that any of its keys may use; None is what its account
    may.
    """

    id: str
    account_id: str
    name: str
    created_at_ns: int
    archived_at_ns: int | None = None
    models: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """A program that owns keys. role: bounds what any of them may do, whatever scopes they were issued with."""

    id: str
    account_id: str
    name: str
    role: Role
    created_at_ns: int
    disabled: bool = False

    def __post_init__(self) -> None:
        assert self.role is not Role.OWNER, "an account is owned by people"


def default_project(account: Account) -> Project:
    return Project(
        account.id, account.id, DEFAULT_PROJECT_NAME, account.created_at_ns, models=account.default_project_models
    )


def new_project_id() -> str:
    return secrets.token_hex(16)


def new_service_account_id() -> str:
    return secrets.token_hex(16)


def new_account_id() -> str:
    return secrets.token_hex(16)


def is_account_id(text: str) -> bool:
    return _ACCOUNT_ID.fullmatch(text) is not None
