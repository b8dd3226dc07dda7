"""Who is asking: what a checked key lets its bearer do. Made by authenticate.py, read by every route."""

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a key may do. Inference keys can't administer; admin keys can't infer."""

    AI_RUN = "ai:run"  # generate
    AI_READ = "ai:read"  # list models, verify the key
    USAGE_READ = "usage:read"  # usage and request records of the own account
    ACCOUNT_ADMIN = "account:admin"  # keys and settings of the own account
    OPERATOR_READ = "operator:read"  # invariants and capacity of the whole service


@dataclass(frozen=True, slots=True)
class Principal:
    """The bearer of a valid key.

    account_id: 32 lower-case hex. key_id: the key's public id (never the key). concurrency: the account's concurrent
    requests, None for no limit. credit_limit_nano: what the account may spend in all, in nano-USD, None for no limit.
    """

    account_id: str
    key_id: str
    scopes: frozenset[Scope]
    concurrency: int | None
    credit_limit_nano: int | None
