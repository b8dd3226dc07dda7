"""The pages that divide an account: projects, service accounts, and limits of both."""

import re

import pytest

from tenancy import projects, provisioning, service_accounts
from tenancy.audit_log import read_audit_log
from tenancy.roles import Role
from tests.api.dashboard.visitors import Dashboard, Visitor, text_of


async def _issued(visitor: Visitor, site: Dashboard, **form: str) -> None:
    answer = await visitor.post(site.path("/keys"), name="ci", **form)
    assert re.search(r'id="key-text">(pg[ia]_live_\w{46})<', answer.body.decode()), text_of(answer)


async def test_a_project_is_opened_renamed_archived_and_restored_by_who_administers(site: Dashboard) -> None:
    admin, developer = await site.visitor("admin"), await site.visitor("developer")
    await admin.get(site.path("/projects"))
    assert (await admin.post(site.path("/projects"), name="search")).status == 303
    project = projects.list_projects(site.database, site.account_id)[1]
    await _issued(admin, site, project=project.id)
    (key,) = provisioning.list_keys(site.database, site.account_id)
    assert key.project_id == project.id
    assert "in search" in text_of(await admin.get(site.path("/keys")))
    one = site.path(f"/projects/{project.id}")
    assert (await admin.post(f"{one}/rename", name="find")).status == 303
    for deed, state in (("archive", "archived"), ("restore", "open")):
        assert (await admin.post(f"{one}/{deed}")).status == 303
        assert f"find {state} 1" in text_of(await admin.get(site.path("/projects")))
    taken = await admin.post(site.path("/projects"), name="find")
    assert taken.status == 400
    assert 'role="alert"' in taken.body.decode()
    assert (await admin.post(f"{one}/sell")).status == 404
    assert (await admin.post(site.path("/projects/unknown/archive"))).status == 404
    actions = [entry.action for entry in read_audit_log(site.database, site.account_id, limit=5)]
    assert actions == ["project.restore", "project.archive", "project.rename", "key.issue", "project.open"]
    page = await developer.get(site.path("/projects"))
    assert "find" in text_of(page)
    assert "Archive" not in text_of(page)
    assert (await developer.post(f"{one}/archive")).status == 403


async def test_who_administers_binds_a_projects_keys_to_models(site: Dashboard) -> None:
    admin, developer = await site.visitor("admin"), await site.visitor("developer")
    project_id = projects.open_project(site.database, site.account_id, "search", models=["gone"]).id
    provisioning.set_models(site.database, site.account_id, ["gone", "m"])
    page = await admin.get(site.path("/projects"))
    assert "This account may use gone, m and nothing else." in text_of(page)
    assert "search only gone" in text_of(page)
    # What is named and served no more is still there to untick.
    assert 'value="gone" checked' in page.body.decode()
    one = site.path(f"/projects/{project_id}/models")
    assert (await developer.post(one, models=["m"])).status == 403
    for ticked, bound in ((["m", "gone"], ("m", "gone")), ([], None)):
        assert (await admin.post(one, models=ticked)).status == 303
        assert projects.get_project(site.database, site.account_id, project_id).models == bound
    default = site.path(f"/projects/{site.account_id}/models")
    assert (await admin.post(default, models=["m"])).status == 303
    assert "default only m" in text_of(await admin.get(site.path("/projects")))


async def test_a_service_account_bounds_the_keys_that_are_issued_for_it(site: Dashboard) -> None:
    admin, developer = await site.visitor("admin"), await site.visitor("developer")
    await admin.get(site.path("/service-accounts"))
    assert (await admin.post(site.path("/service-accounts"), name="nightly", role="viewer")).status == 303
    (program,) = service_accounts.list_service_accounts(site.database, site.account_id)
    await _issued(admin, site, owner=program.id)
    (key,) = provisioning.list_keys(site.database, site.account_id)
    assert (key.service_account_id, "ai:run" in key.scopes) == (program.id, False)
    assert "of nightly" in text_of(await admin.get(site.path("/keys")))
    beyond = await admin.post(site.path("/keys"), name="more", owner=program.id, scopes=["ai:run"])
    assert beyond.status == 400
    one = site.path(f"/service-accounts/{program.id}")
    assert (await admin.post(f"{one}/role", role="developer")).status == 303
    assert (await admin.post(f"{one}/disable")).status == 303
    changed = service_accounts.get_service_account(site.database, site.account_id, program.id)
    assert (changed.role, changed.disabled) == (Role.DEVELOPER, True)
    assert "nightly disabled" in text_of(await admin.get(site.path("/service-accounts")))
    for role in ("owner", "king", ""):
        assert (await admin.post(f"{one}/role", role=role)).status == 400
        assert (await admin.post(site.path("/service-accounts"), name="x", role=role)).status == 400
    assert (await admin.post(f"{one}/sell")).status == 404
    assert (await developer.get(site.path("/service-accounts"))).status == 403
    assert (await developer.post(f"{one}/enable")).status == 403


async def test_who_administers_limits_projects_and_keys_and_an_operator_the_account(site: Dashboard) -> None:
    admin, operator = await site.visitor("admin"), await site.visitor("operator")
    project = projects.open_project(site.database, site.account_id, "search").id
    await admin.get(site.path("/limits"))
    await operator.get(site.path("/limits"))
    path, rule = site.path("/limits"), {"meter": "requests_per_minute", "model": ""}
    assert (await admin.post(path, **rule, limit="1,000", of=f"project:{project}")).status == 303
    assert (await admin.post(path, **rule, limit="7", of="")).status == 403
    assert (await operator.post(path, **rule, limit="7", of="")).status == 303
    rules = provisioning.list_quotas(site.database, site.account_id)
    assert {(one.project_id, one.limit) for one in rules} == {(project, 1000), (None, 7)}
    page = text_of(await admin.get(path))
    assert "requests per minute 1,000 project search all together account Remove" in page
    assert "requests per minute 7 the whole account all together operator" in page
    assert "requests per minute 7 the whole account all together operator Remove" not in page
    assert "requests per minute 7 the whole account all together operator Remove" in text_of(await operator.get(path))
    assert (await admin.post(f"{path}/remove", **rule, of="")).status == 403
    assert (await admin.post(f"{path}/remove", **rule, of=f"project:{project}")).status == 303
    assert (await operator.post(f"{path}/remove", **rule, of="")).status == 303
    assert provisioning.list_quotas(site.database, site.account_id) == []
    viewer = await site.visitor("viewer")
    assert "Set a limit" not in text_of(await viewer.get(path))
    assert (await viewer.post(path, **rule, limit="7", of=f"project:{project}")).status == 403


async def test_what_an_operator_sets_of_a_project_its_own_admins_see_and_can_not_remove(site: Dashboard) -> None:
    admin, operator = await site.visitor("admin"), await site.visitor("operator")
    project = projects.open_project(site.database, site.account_id, "search").id
    await admin.get(site.path("/limits"))
    await operator.get(site.path("/limits"))
    path, rule = site.path("/limits"), {"meter": "requests_per_minute", "model": "", "of": f"project:{project}"}
    assert (await operator.post(path, **rule, limit="7")).status == 303
    assert (await admin.post(path, **rule, limit="900")).status == 303
    assert (await operator.post(site.path("/budgets"), limit="5", period="day")).status == 303
    page = text_of(await admin.get(path))
    assert "requests per minute 7 project search all together operator Remove" not in page
    assert "requests per minute 900 project search all together account Remove" in page
    (budget,) = site.services.budgets.standings(site.account_id)
    for refused in (
        await admin.post(f"{path}/remove", **rule, set_by="operator"),
        await admin.post(site.path(f"/budgets/{budget.budget.id}/remove")),
    ):
        assert (refused.status, "set by the operator" in text_of(refused)) == (403, True)
    assert (await admin.post(f"{path}/remove", **rule, set_by="nobody")).status == 400
    assert (await admin.post(f"{path}/remove", **rule, set_by="account")).status == 303
    assert (await operator.post(f"{path}/remove", **rule, set_by="operator")).status == 303
    assert (await operator.post(site.path(f"/budgets/{budget.budget.id}/remove"))).status == 303
    assert (
        provisioning.list_quotas(site.database, site.account_id),
        site.services.budgets.standings(site.account_id),
    ) == ([], [])


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"limit": "0"}, 400),
        ({"limit": "-3"}, 400),
        ({"limit": "9" * 14}, 400),
        ({"limit": "much"}, 400),
        ({"meter": "requests_per_hour"}, 400),
        ({"of": "project:unknown"}, 404),
        ({"of": "key:unknown"}, 404),
    ],
)
async def test_a_limit_that_can_not_be_is_refused_with_a_reason(
    site: Dashboard, form: dict[str, str], status: int
) -> None:
    visitor = await site.visitor("owner")
    values = {"meter": "requests_per_day", "limit": "5", "of": f"project:{site.account_id}"} | form
    assert (await visitor.post(site.path("/limits"), **values)).status == status
    assert provisioning.list_quotas(site.database, site.account_id) == []
