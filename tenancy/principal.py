"""Who is asking: what a checked key lets its bearer do. Made by authenticate.py, read by every route."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

from tenancy.quotas import Quota

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address


class Scope(StrEnum):
    """What a key may do. Inference keys can't administer; admin keys can't infer."""

    AI_RUN = "ai:run"  # generate
    AI_READ = "ai:read"  # list models, verify the key
    USAGE_READ = "usage:read"  # usage and request records of the own account
    ACCOUNT_ADMIN = "account:admin"  # keys and settings of the own account
    OPERATOR_READ = "operator:read"  # invariants and capacity of the whole service
    OPERATOR_WRITE = "operator:write"  # accounts and their limits, switches, units and rollouts of models


# What reaches beyond the own account: such a scope is asked for by name.
OPERATOR_SCOPES: Final = frozenset({Scope.OPERATOR_READ, Scope.OPERATOR_WRITE})


@dataclass(frozen=True, slots=True)
class Principal:
    """The bearer of a valid key.

    account_id: 32 lower-case hex. key_id: the key's public id (never the key). concurrency: the account's concurrent
    requests, None for no limit. credit_limit_nano: what the account may spend in all, in nano-USD, None for no limit.
    lineage_id: the first of the keys that were rotated into this one, None if it is itself. quotas: all rules of the
    account; those of other keys don't match. models, networks: what the key may use, and from where; None: all. models
    is what account, project and key all allow, and may be nothing.
    tier, weight_percent: the account's turns among those who wait. project_id: None for the account's default project.
    regions: where engines may see the account's prompts; None: anywhere.
    """

    account_id: str
    key_id: str
    scopes: frozenset[Scope]
    concurrency: int | None
    credit_limit_nano: int | None
    lineage_id: str | None = None
    quotas: tuple[Quota, ...] = ()
    models: frozenset[str] | None = None
    networks: tuple[Network, ...] | None = None
    tier: int = 0
    weight_percent: int = 100
    project_id: str | None = None
    regions: frozenset[str] | None = None

    @property
    def lineage(self) -> str:
        """Under which the key's limits and budgets are known; its successors share them."""
        return self.lineage_id or self.key_id

    @property
    def project(self) -> str:
        """Under which the project's limits and budgets are known."""
        return self.project_id or self.account_id

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def may_come_from(self, address: Address | None) -> bool:
        """address: None if it is not known; a key that is bound to networks is then refused."""
        if self.networks is None:
            return True
        return address is not None and any(address in network for network in self.networks)


def allowed_by_all(*lists: Collection[str] | None) -> frozenset[str] | None:
    """The models that are in every list; None is no list. So whoever adds one can only narrow what the others leave."""
    found: frozenset[str] | None = None
    for models in lists:
        if models is not None:
            found = frozenset(models) if found is None else found.intersection(models)
    return found
