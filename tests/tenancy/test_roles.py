"""Who may do what: the table, and that nobody but an owner touches owners."""

import itertools

import pytest

from tenancy.roles import OPERATOR_RIGHTS, RIGHTS, Right, Role, may_change_member, rights_of


@pytest.mark.parametrize(
    ("right", "holders"),
    [
        (Right.SEE_USAGE, set(Role)),
        (Right.SEE_MONEY, {Role.OWNER, Role.ADMIN, Role.BILLING}),
        (Right.SET_BUDGETS, {Role.OWNER, Role.ADMIN, Role.BILLING}),
        (Right.GENERATE, {Role.OWNER, Role.ADMIN, Role.DEVELOPER}),
        (Right.MANAGE_KEYS, {Role.OWNER, Role.ADMIN, Role.DEVELOPER}),
        (Right.ADMINISTER, {Role.OWNER, Role.ADMIN}),
        (Right.APPOINT_OWNERS, {Role.OWNER}),
    ],
)
def test_each_right_is_held_by_these_roles(right: Right, holders: set[Role]) -> None:
    assert {role for role in Role if right in RIGHTS[role]} == holders


def test_operators_may_do_all_but_spend_a_tenants_money() -> None:
    assert rights_of(None, operator=True) == set(Right) - {Right.GENERATE} == OPERATOR_RIGHTS
    assert Right.GENERATE in rights_of(Role.DEVELOPER, operator=True)


def test_who_is_no_member_may_do_nothing() -> None:
    assert rights_of(None, operator=False) == frozenset()


@pytest.mark.parametrize(("before", "after"), [*itertools.product([None, *Role], repeat=2)])
def test_admins_change_members_and_only_owners_change_owners(before: Role | None, after: Role | None) -> None:
    assert may_change_member(RIGHTS[Role.OWNER], before=before, after=after)
    assert may_change_member(RIGHTS[Role.ADMIN], before=before, after=after) is (Role.OWNER not in {before, after})
    assert not may_change_member(RIGHTS[Role.DEVELOPER], before=before, after=after)
