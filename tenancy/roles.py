"""Roles of users in an account, and the one table of what each may do. Pure; the dashboard and the console ask.

               see usage   see money   set budgets   generate   keys for inference   administer   appoint owners
    owner          ×           ×            ×            ×               ×               ×              ×
    admin          ×           ×            ×            ×               ×               ×
    developer      ×                                     ×               ×
    billing        ×           ×            ×
    viewer         ×

A service account has one of them too, but for owner; the table's second half says what its keys may do at most.

Operators are no role: whoever runs the service is marked as such on the user, and may do all in every account but spend
its money.
"""

from enum import StrEnum
from typing import Final

from tenancy.principal import OPERATOR_SCOPES, Scope


class Role(StrEnum):
    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    BILLING = "billing"
    VIEWER = "viewer"


class Right(StrEnum):
    SEE_USAGE = "see usage"  # usage, requests, limits, models, keys without their texts
    SEE_MONEY = "see money"  # wallet, ledger, grants
    SET_BUDGETS = "set budgets"
    GENERATE = "generate"  # the playground, at the account's cost
    MANAGE_KEYS = "manage keys"  # keys that infer
    ADMINISTER = "administer"  # members, keys that administer, the audit log
    APPOINT_OWNERS = "appoint owners"


_SEES: Final = frozenset({Right.SEE_USAGE})
_PAYS: Final = _SEES | {Right.SEE_MONEY, Right.SET_BUDGETS}
_BUILDS: Final = _SEES | {Right.GENERATE, Right.MANAGE_KEYS}
RIGHTS: Final = {
    Role.OWNER: frozenset(Right),
    Role.ADMIN: frozenset(Right) - {Right.APPOINT_OWNERS},
    Role.DEVELOPER: _BUILDS,
    Role.BILLING: _PAYS,
    Role.VIEWER: _SEES,
}


_LOOKS: Final = frozenset({Scope.AI_READ, Scope.USAGE_READ})
SCOPES: Final = {
    Role.ADMIN: frozenset(Scope) - OPERATOR_SCOPES,
    Role.DEVELOPER: _LOOKS | {Scope.AI_RUN},
    Role.BILLING: _LOOKS,
    Role.VIEWER: _LOOKS,
}


# Without being a member. Not the playground: it would spend the tenant's money.
OPERATOR_RIGHTS: Final = frozenset(Right) - {Right.GENERATE}
NO_RIGHTS: Final[frozenset[Right]] = frozenset()


def rights_of(role: Role | None, *, operator: bool) -> frozenset[Right]:
    """What a user may do in an account. role: None if the user is no member of it."""
    return (NO_RIGHTS if role is None else RIGHTS[role]) | (OPERATOR_RIGHTS if operator else NO_RIGHTS)


def loses_power_to_invite(before: Role | None, after: Role | None) -> bool:
    """Whether somebody may no longer invite whom they could. None: no member."""
    may, might = rights_of(after, operator=False), rights_of(before, operator=False)
    return bool((might - may) & {Right.ADMINISTER, Right.APPOINT_OWNERS})


def may_change_member(rights: frozenset[Right], *, before: Role | None, after: Role | None) -> bool:
    """Whether a member's role may become `after` from `before`; None: no member. Nobody touches owners but owners."""
    concerned = Right.APPOINT_OWNERS if Role.OWNER in {before, after} else Right.ADMINISTER
    return concerned in rights
