"""Lists of models: an account's, a project's and a key's; what a key may use is in all of them."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenancy import projects, provisioning, service_accounts
from tenancy.accounts import Account
from tenancy.audit_log import read_audit_log
from tenancy.authenticate import Authenticator, act_for, principal_of_key
from tenancy.database import Database, open_database
from tenancy.errors import AccountNotFound, ProjectNotFound
from tenancy.keys import KeyKind
from tenancy.principal import Principal, Scope, allowed_by_all
from tenancy.provisioning import IssuedKey, ProvisioningInvalid
from tenancy.roles import Role
from tests.examples import examples
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases

MODELS: Final = ("m0", "m1", "m2")

Issue = Callable[..., IssuedKey]


@pytest.fixture
def account(database: Database, clock: SettableClock) -> Account:
    return provisioning.open_account(database, "acme", clock=clock)


@pytest.fixture
def issue(database: Database, account: Account, clock: SettableClock) -> Issue:
    def issue(**options: object) -> IssuedKey:
        values: dict[str, object] = {"name": "k", "kind": KeyKind.INFERENCE, "clock": clock} | options
        return provisioning.issue_key(database, PEPPER, account.id, **values)  # type: ignore[arg-type]  # as the tests name them

    return issue


def _usable(principal: Principal) -> set[str]:
    return {model for model in MODELS if principal.may_use(model)}


@over_both_databases
async def test_a_projects_list_binds_keys_that_exist_within_a_second(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    project = projects.open_project(database, account.id, "search")
    key, elsewhere = issue(project_id=project.id), issue()
    authenticator = Authenticator(database, PEPPER, clock=clock)
    assert _usable(await authenticator.authenticate(key.text)) == set(MODELS)
    for models, usable in ((["m1", "m2"], {"m1", "m2"}), (["m0"], {"m0"}), (None, set(MODELS))):
        bound = projects.set_models(database, account.id, project.id, models)
        assert bound.models == (None if models is None else tuple(models))
        clock.advance_s(0.999)
        assert _usable(await authenticator.authenticate(key.text)) == usable
        assert _usable(await authenticator.authenticate(elsewhere.text)) == set(MODELS)


@over_both_databases
def test_a_key_without_a_list_is_bound_by_its_projects_however_it_was_made(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    project = projects.open_project(database, account.id, "search", models=["m0"])
    program = service_accounts.add_service_account(database, account.id, "nightly", Role.DEVELOPER)
    first = issue(project_id=project.id)
    made = [
        first,
        issue(project_id=project.id, service_account_id=program.id),
        issue(project_id=project.id, models=["m0", "m1"]),
        provisioning.rotate_key(database, PEPPER, account.id, first.key.id, grace_s=0, clock=clock),
    ]
    for issued in made[1:]:
        found = principal_of_key(database, account.id, issued.key.id, Scope.AI_RUN, clock())
        assert _usable(found) == {"m0"}
    # A member who uses no key at all, and one whose key's limits are looked at.
    projects.set_models(database, account.id, account.id, ["m2"])
    assert _usable(act_for(database, account.id, "playground", frozenset({Scope.AI_RUN}))) == {"m2"}
    assert _usable(act_for(database, account.id, first.key.id, frozenset())) == {"m0"}


@over_both_databases
def test_lists_that_share_nothing_leave_nothing(
    database: Database, account: Account, issue: Issue, clock: SettableClock
) -> None:
    key = issue(models=["m0", "m1"]).key
    projects.set_models(database, account.id, account.id, ["m1", "m2"])
    assert provisioning.set_models(database, account.id, ["m0", "m2"]).models == ("m0", "m2")
    found = principal_of_key(database, account.id, key.id, Scope.AI_RUN, clock())
    assert (found.models, _usable(found)) == (frozenset(), set())
    provisioning.set_models(database, account.id, None)
    assert _usable(principal_of_key(database, account.id, key.id, Scope.AI_RUN, clock())) == {"m1"}


@over_both_databases
def test_lists_are_listed_logged_and_another_accounts_are_unknown(
    database: Database, account: Account, clock: SettableClock
) -> None:
    clock.advance_s(1)
    other = provisioning.open_account(database, "other", clock=clock)
    project = projects.open_project(database, account.id, "search", models=["m0", "m0", "m1"])
    projects.set_models(database, account.id, account.id, ["m2"])
    provisioning.set_models(database, account.id, ["m0"])
    listed = projects.list_projects(database, account.id)
    assert [one.models for one in listed] == [("m2",), ("m0", "m1")]
    assert projects.list_projects(database, other.id)[0].models is None
    assert [one.models for one in provisioning.list_accounts(database)] == [("m0",), None]
    with pytest.raises(ProjectNotFound):
        projects.set_models(database, other.id, project.id, ["m2"])
    with pytest.raises(AccountNotFound):
        provisioning.set_models(database, "f" * 32, ["m2"])
    for models in ([], ["two words"], [f"m{number}" for number in range(101)]):
        with pytest.raises(ProvisioningInvalid):
            projects.set_models(database, account.id, project.id, models)
    assert projects.get_project(database, account.id, project.id) == project
    entries = [(entry.action, entry.detail) for entry in read_audit_log(database, account.id, limit=3)]
    assert entries == [
        ("account.set_models", '{"models":"m0"}'),
        ("project.set_models", '{"models":"m2"}'),
        ("project.open", '{"models":"m0 m1","name":"search"}'),
    ]


_LISTS = st.none() | st.lists(st.sampled_from(MODELS), min_size=1, max_size=3)


@settings(max_examples=examples(40))
@given(_LISTS, _LISTS, _LISTS)
def test_one_more_list_never_allows_more(first: list[str] | None, second: list[str] | None, third: list[str]) -> None:
    before, after = allowed_by_all(first, second), allowed_by_all(first, second, third)
    assert before is None or (after is not None and after <= before)
    for models in (first, second, third):
        assert models is None or (after is not None and after <= set(models))


_EDITS = st.lists(
    st.tuples(st.sampled_from(["account", "default", "project", "issue", "issue elsewhere", "rotate"]), _LISTS),
    min_size=1,
    max_size=6,
)


@pytest.mark.load
@settings(max_examples=examples(12))
@given(edits=_EDITS)
def test_no_history_of_edits_lets_a_key_reach_what_its_project_or_account_lacks(
    edits: list[tuple[str, list[str] | None]], migrated_file: Path
) -> None:
    clock = SettableClock()
    with TemporaryDirectory() as folder:
        copy(migrated_file, f"{folder}/pagegate.db")
        database = open_database(f"sqlite:///{folder}/pagegate.db")
        account_id = provisioning.open_account(database, "acme", clock=clock).id
        parts = {"default": account_id, "project": projects.open_project(database, account_id, "search").id}
        told: dict[str, list[str] | None] = {"account": None, "default": None, "project": None}
        keys: list[tuple[str, str, list[str] | None]] = []
        for deed, models in edits:
            if deed == "account":
                provisioning.set_models(database, account_id, models)
                told[deed] = models
            elif deed in parts:
                projects.set_models(database, account_id, parts[deed], models)
                told[deed] = models
            elif deed == "rotate":
                if keys:
                    part, key_id, own = keys.pop(0)
                    issued = provisioning.rotate_key(database, PEPPER, account_id, key_id, grace_s=0, clock=clock)
                    keys.append((part, issued.key.id, own))
            else:
                part = "project" if deed == "issue" else "default"
                issued = provisioning.issue_key(
                    database,
                    PEPPER,
                    account_id,
                    name="k",
                    kind=KeyKind.INFERENCE,
                    models=models,
                    project_id=parts[part],
                    clock=clock,
                )
                keys.append((part, issued.key.id, models))
            for part, key_id, own in keys:
                lists = (told["account"], told[part], own)
                wanted = {model for model in MODELS if all(one is None or model in one for one in lists)}
                found = principal_of_key(database, account_id, key_id, Scope.AI_RUN, clock())
                assert _usable(found) == wanted
        database.close()
