"""Service accounts: their role bounds their keys, whatever these were issued with; disabled, they refuse them all."""

from collections.abc import Callable

import pytest

from tenancy import provisioning, service_accounts
from tenancy.accounts import Account
from tenancy.audit_log import read_audit_log
from tenancy.authenticate import Authenticator, principal_of_key
from tenancy.database import Database
from tenancy.errors import (
    AccountSuspended,
    KeyDisabled,
    KeyExpired,
    KeyRevoked,
    NameTaken,
    ScopeMissing,
    ServiceAccountNotFound,
    TenancyError,
)
from tenancy.keys import KeyKind
from tenancy.principal import Scope
from tenancy.provisioning import IssuedKey, ProvisioningInvalid
from tenancy.roles import Role
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases

pytestmark = over_both_databases

Issue = Callable[..., IssuedKey]


@pytest.fixture
def account(database: Database, clock: SettableClock) -> Account:
    return provisioning.open_account(database, "acme", clock=clock)


@pytest.fixture
def issue(database: Database, account: Account, clock: SettableClock) -> Issue:
    def issue(owner_id: str | None, kind: KeyKind = KeyKind.INFERENCE, scopes: set[Scope] | None = None) -> IssuedKey:
        return provisioning.issue_key(
            database,
            PEPPER,
            account.id,
            name="k",
            kind=kind,
            scopes=scopes,
            service_account_id=owner_id,
            clock=clock,
        )

    return issue


async def test_a_lesser_role_takes_from_every_key_within_a_second(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    robot = service_accounts.add_service_account(database, account.id, "deploy", Role.DEVELOPER)
    key = issue(robot.id)
    authenticator = Authenticator(database, PEPPER, clock=clock)
    assert (await authenticator.authenticate(key.text)).scopes == {Scope.AI_RUN, Scope.AI_READ, Scope.USAGE_READ}
    service_accounts.change_service_account(database, account.id, robot.id, role=Role.VIEWER)
    clock.advance_s(0.999)
    assert (await authenticator.authenticate(key.text)).scopes == {Scope.AI_READ, Scope.USAGE_READ}
    successor = provisioning.rotate_key(database, PEPPER, account.id, key.key.id, grace_s=0, clock=clock)
    assert Scope.AI_RUN not in (await authenticator.authenticate(successor.text)).scopes
    with pytest.raises(ScopeMissing):  # what it ordered before is not run either
        principal_of_key(database, account.id, successor.key.id, Scope.AI_RUN, clock())
    assert principal_of_key(database, account.id, successor.key.id, Scope.AI_READ, clock()).account_id == account.id


def test_what_is_done_later_for_a_key_is_done_where_the_account_now_allows(
    database: Database, clock: SettableClock
) -> None:
    account = provisioning.open_account(database, "acme", clock=clock)
    issued = provisioning.issue_key(database, PEPPER, account.id, name="k", kind=KeyKind.INFERENCE, clock=clock)
    provisioning.set_regions(database, account.id, ["eu-west"], clock=clock)
    found = principal_of_key(database, account.id, issued.key.id, Scope.AI_RUN, clock())
    assert found.regions == frozenset({"eu-west"})


async def test_a_disabled_one_disables_all_its_keys_and_no_others(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    robot = service_accounts.add_service_account(database, account.id, "deploy", Role.ADMIN)
    keys = [issue(robot.id), issue(robot.id, KeyKind.ADMIN)]
    other = provisioning.issue_key(database, PEPPER, account.id, name="k", kind=KeyKind.INFERENCE, clock=clock)
    authenticator = Authenticator(database, PEPPER, clock=clock)
    for key in [*keys, other]:
        await authenticator.authenticate(key.text)
    service_accounts.change_service_account(database, account.id, robot.id, disabled=True)
    clock.advance_s(0.999)
    for key in keys:
        with pytest.raises(KeyDisabled, match="service account"):
            await authenticator.authenticate(key.text)
    await authenticator.authenticate(other.text)
    service_accounts.change_service_account(database, account.id, robot.id, disabled=False)
    clock.advance_s(0.999)
    await authenticator.authenticate(keys[0].text)
    assert [entry.action for entry in read_audit_log(database, account.id)][:2] == [
        "service_account.enable",
        "service_account.disable",
    ]


def test_a_key_is_issued_within_its_owners_role(database: Database, account: Account, issue: Issue) -> None:
    robot = service_accounts.add_service_account(database, account.id, "books", Role.BILLING)
    assert issue(robot.id).key.scopes == {Scope.AI_READ, Scope.USAGE_READ}
    with pytest.raises(ProvisioningInvalid):
        issue(robot.id, scopes={Scope.AI_RUN})
    with pytest.raises(ProvisioningInvalid):
        issue(robot.id, KeyKind.ADMIN, scopes={Scope.ACCOUNT_ADMIN})


def test_an_operators_view_is_asked_for_by_name(database: Database, account: Account, clock: SettableClock) -> None:
    def scopes(asked: set[Scope] | None) -> frozenset[Scope]:
        issued = provisioning.issue_key(
            database, PEPPER, account.id, name="k", kind=KeyKind.ADMIN, scopes=asked, clock=clock
        )
        return issued.key.scopes

    assert scopes(None) == {Scope.AI_READ, Scope.USAGE_READ, Scope.ACCOUNT_ADMIN}
    assert scopes({Scope.OPERATOR_READ}) == {Scope.OPERATOR_READ}


def test_what_can_not_be_is_refused_and_a_foreign_one_is_unknown(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    other = provisioning.open_account(database, "other", clock=clock)
    theirs = service_accounts.add_service_account(database, other.id, "deploy", Role.VIEWER)
    mine = service_accounts.add_service_account(database, account.id, "deploy", Role.VIEWER)
    with pytest.raises(NameTaken):
        service_accounts.add_service_account(database, account.id, "deploy", Role.VIEWER)
    with pytest.raises(ProvisioningInvalid):
        service_accounts.add_service_account(database, account.id, "chief", Role.OWNER)
    with pytest.raises(ProvisioningInvalid):
        service_accounts.change_service_account(database, account.id, mine.id, role=Role.OWNER)
    told = set()
    for owner_id in (theirs.id, "f" * 32):
        deeds: tuple[Callable[[str], object], ...] = (
            issue,
            lambda one: service_accounts.get_service_account(database, account.id, one),
            lambda one: service_accounts.change_service_account(database, account.id, one, disabled=True),
        )
        for deed in deeds:
            with pytest.raises(ServiceAccountNotFound) as refusal:
                deed(owner_id)
            told.add(refusal.value.message)
    assert len(told) == 1
    assert service_accounts.list_service_accounts(database, account.id) == [mine]


@pytest.mark.parametrize("kind", KeyKind)
@pytest.mark.parametrize("owned", [False, True])
async def test_no_kind_of_key_goes_on_when_it_or_its_account_is_blocked(
    database: Database, account: Account, issue: Issue, clock: SettableClock, kind: KeyKind, *, owned: bool
) -> None:
    robot = service_accounts.add_service_account(database, account.id, "deploy", Role.ADMIN)
    authenticator = Authenticator(database, PEPPER, clock=clock)

    async def refused(block: Callable[[IssuedKey], object], wanted: type[TenancyError]) -> None:
        key = issue(robot.id if owned else None, kind)
        await authenticator.authenticate(key.text)
        block(key)
        clock.advance_s(0.999)
        assert authenticator.cached(key.text) is None
        with pytest.raises(wanted):
            await authenticator.authenticate(key.text)

    await refused(
        lambda key: provisioning.set_key_disabled(database, account.id, key.key.id, disabled=True), KeyDisabled
    )
    await refused(lambda key: provisioning.revoke_key(database, account.id, key.key.id, clock=clock), KeyRevoked)
    await refused(
        lambda key: provisioning.rotate_key(database, PEPPER, account.id, key.key.id, grace_s=0, clock=clock),
        KeyExpired,
    )
    await refused(lambda _: provisioning.set_suspended(database, account.id, suspended=True), AccountSuspended)
