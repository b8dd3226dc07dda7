"""Projects: opened, renamed, archived; their keys and limits; a foreign one is an unknown one."""

from collections.abc import Callable

import pytest

from tenancy import projects, provisioning
from tenancy.accounts import Account
from tenancy.audit_log import read_audit_log
from tenancy.authenticate import Authenticator
from tenancy.claims import Meter
from tenancy.database import Database
from tenancy.errors import AccountNotFound, NameTaken, ProjectArchived, ProjectNotFound
from tenancy.keys import KeyKind
from tenancy.provisioning import IssuedKey, ProvisioningInvalid
from tenancy.quotas import Quota
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases

pytestmark = over_both_databases

Issue = Callable[..., IssuedKey]


@pytest.fixture
def account(database: Database, clock: SettableClock) -> Account:
    return provisioning.open_account(database, "acme", clock=clock)


@pytest.fixture
def issue(database: Database, account: Account, clock: SettableClock) -> Issue:
    def issue(project_id: str | None = None) -> IssuedKey:
        return provisioning.issue_key(
            database, PEPPER, account.id, name="k", kind=KeyKind.INFERENCE, project_id=project_id, clock=clock
        )

    return issue


def test_every_account_has_a_default_project_that_stays_as_it_is(database: Database, account: Account) -> None:
    (default,) = projects.list_projects(database, account.id)
    assert (default.id, default.name, default.archived_at_ns) == (account.id, "default", None)
    for change in ({"name": "other"}, {"archived": True}):
        with pytest.raises(ProvisioningInvalid):
            projects.change_project(database, account.id, account.id, **change)
    with pytest.raises(AccountNotFound):
        projects.list_projects(database, "f" * 32)


def test_a_name_is_one_projects_in_its_account(database: Database, account: Account, clock: SettableClock) -> None:
    other = provisioning.open_account(database, "other", clock=clock)
    first = projects.open_project(database, account.id, "search")
    projects.open_project(database, other.id, "search")
    second = projects.open_project(database, account.id, "chat")
    for name in ("search", "default"):
        with pytest.raises(NameTaken):
            projects.open_project(database, account.id, name)
        with pytest.raises(NameTaken):
            projects.change_project(database, account.id, second.id, name=name)
    projects.change_project(database, account.id, first.id, name="search")
    assert projects.change_project(database, account.id, first.id, name="find").name == "find"
    assert {one.name for one in projects.list_projects(database, account.id)} == {"default", "find", "chat"}
    with pytest.raises(ProvisioningInvalid):
        projects.open_project(database, account.id, "two\nlines")


def test_a_name_and_models_change_together_or_not_at_all(database: Database, account: Account) -> None:
    project = projects.open_project(database, account.id, "search")
    projects.open_project(database, account.id, "other")
    for name, models, refusal in (("find", ["two words"], ProvisioningInvalid), ("other", ["m"], NameTaken)):
        with pytest.raises(refusal):
            projects.change_project(database, account.id, project.id, name=name, binding=projects.Binding(models))
        assert projects.get_project(database, account.id, project.id) == project
    changed = projects.change_project(database, account.id, project.id, name="find", binding=projects.Binding(["m"]))
    assert (changed.name, changed.models) == ("find", ("m",))
    entries = [entry.action for entry in read_audit_log(database, account.id)]
    assert entries[:2] == ["project.set_models", "project.rename"]


def test_another_accounts_project_is_as_unknown_as_none(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    other = provisioning.open_account(database, "other", clock=clock)
    foreign = projects.open_project(database, other.id, "theirs")
    told = set()
    for project_id in (foreign.id, other.id, "f" * 32):
        deeds: tuple[Callable[[str], object], ...] = (
            lambda project_id: projects.get_project(database, account.id, project_id),
            lambda project_id: projects.change_project(database, account.id, project_id, archived=True),
            lambda project_id: provisioning.set_quota(
                database, account.id, Meter.REQUESTS_PER_DAY, 1, project_id=project_id
            ),
            issue,
        )
        for deed in deeds:
            with pytest.raises(ProjectNotFound) as refusal:
                deed(project_id)
            told.add(refusal.value.message)
    assert len(told) == 1
    assert projects.get_project(database, other.id, foreign.id).archived_at_ns is None


async def test_an_archived_projects_keys_are_refused_within_a_second_until_it_is_restored(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    project = projects.open_project(database, account.id, "search")
    key, elsewhere = issue(project.id), issue()
    authenticator = Authenticator(database, PEPPER, clock=clock)
    principal = await authenticator.authenticate(key.text)
    assert (principal.project, (await authenticator.authenticate(elsewhere.text)).project) == (project.id, account.id)
    projects.change_project(database, account.id, project.id, archived=True)
    clock.advance_s(0.999)
    with pytest.raises(ProjectArchived):
        await authenticator.authenticate(key.text)
    await authenticator.authenticate(elsewhere.text)
    with pytest.raises(ProvisioningInvalid, match="archived"):
        issue(project.id)
    projects.change_project(database, account.id, project.id, archived=False)
    clock.advance_s(0.999)
    await authenticator.authenticate(key.text)
    assert [entry.action for entry in read_audit_log(database, account.id)][:3] == [
        "project.restore",
        "project.archive",
        "key.issue",
    ]


def test_a_rotated_key_stays_in_its_project(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    project = projects.open_project(database, account.id, "search")
    old = issue(project.id).key
    new = provisioning.rotate_key(database, PEPPER, account.id, old.id, grace_s=0, clock=clock).key
    assert (new.project, new.lineage) == (project.id, old.id)


def test_a_limit_is_a_projects_a_keys_or_the_accounts(database: Database, account: Account, issue: Issue) -> None:
    project = projects.open_project(database, account.id, "search")
    key = issue(project.id).key
    meter = Meter.REQUESTS_PER_DAY
    provisioning.set_quota(database, account.id, meter, 1)
    provisioning.set_quota(database, account.id, meter, 2, project_id=project.id)
    provisioning.set_quota(database, account.id, meter, 3, project_id=project.id)
    provisioning.set_quota(database, account.id, meter, 4, key_id=key.id)
    with pytest.raises(ProvisioningInvalid, match="one project"):
        provisioning.set_quota(database, account.id, meter, 5, key_id=key.id, project_id=project.id)
    assert provisioning.list_quotas(database, account.id) == [
        Quota(meter, 1),
        Quota(meter, 4, key_id=key.id),
        Quota(meter, 3, project_id=project.id),
    ]
    provisioning.remove_quota(database, account.id, meter, project_id=project.id)
    assert len(provisioning.list_quotas(database, account.id)) == 2
