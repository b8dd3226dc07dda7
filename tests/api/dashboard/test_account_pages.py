"""The forms of an account's pages: keys, budgets, members; and that no name is ever more than text."""

import re
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from api.app import create_app
from api.dashboard.assets import Assets
from gateway.catalogue import Catalogue
from tenancy import provisioning
from tenancy.audit_log import read_audit_log
from tenancy.authenticate import Authenticator
from tenancy.pepper import open_pepper
from tests.api.dashboard.visitors import Dashboard, Visitor, text_of
from tests.fakes import CARD

XSS = "<script>alert(1)</script><img src=x onerror=alert(1)>'\"{{7*7}}"


async def _issue(visitor: Visitor, site: Dashboard, **form: str) -> str:
    await visitor.get(site.path("/keys"))
    answer = await visitor.post(site.path("/keys"), **({"name": "ci"} | form))
    found = re.search(r'id="key-text">(pg[ia]_live_\w{46})<', answer.body.decode())
    assert found, text_of(answer)
    return found[1]


async def test_a_key_is_shown_once_works_and_ends(site: Dashboard) -> None:
    visitor = await site.visitor("developer")
    text = await _issue(visitor, site, networks="192.0.2.0/24, 2001:db8::/32", expires="2099-01-01")
    page = await visitor.get(site.path("/keys"))
    assert text not in page.body.decode()
    assert "192.0.2.0/24" in text_of(page)
    authenticator = Authenticator(
        site.database, open_pepper(site.services.settings.pepper_path), ttl_s=1e-9, negative_ttl_s=1e-9, stale_s=0
    )
    principal = await authenticator.authenticate(text)
    assert principal.account_id == site.account_id
    rotated = await visitor.post(site.path(f"/keys/{principal.key_id}/rotate"), grace="3600")
    successor = re.search(r'id="key-text">(pgi_live_\w{46})<', rotated.body.decode())
    assert successor
    assert (await authenticator.authenticate(successor[1])).lineage_id == principal.key_id
    for deed, state in (("disable", "disabled"), ("enable", "enabled"), ("revoke", "revoked")):
        assert (await visitor.post(site.path(f"/keys/{principal.key_id}/{deed}"))).status == 303
        row = text_of(await visitor.get(site.path("/keys")))
        assert state in row
    assert provisioning.get_key(site.database, site.account_id, principal.key_id).revoked_at_ns is not None
    actions = [entry.action for entry in read_audit_log(site.database, site.account_id, limit=5)]
    assert actions == ["key.revoke", "key.enable", "key.disable", "key.rotate", "key.issue"]
    actors = {entry.actor_id for entry in read_audit_log(site.database, site.account_id, limit=5)}
    assert actors == {site.users["developer"].id}


async def test_a_developer_neither_issues_nor_revokes_keys_that_administer(site: Dashboard) -> None:
    admin, developer = await site.visitor("admin"), await site.visitor("developer")
    assert (await _issue(admin, site, kind="admin")).startswith("pga_live_")
    (key,) = [key for key in provisioning.list_keys(site.database, site.account_id) if key.kind.value == "admin"]
    assert "operator:read" not in key.scopes
    await developer.get(site.path("/keys"))
    assert (await developer.post(site.path("/keys"), name="x", kind="admin")).status == 403
    assert (await developer.post(site.path(f"/keys/{key.id}/revoke"))).status == 403


@pytest.mark.parametrize(
    "form", [{"name": ""}, {"expires": "2001-01-01"}, {"expires": "soon"}, {"networks": "everywhere"}, {"name": "a\nb"}]
)
async def test_a_key_that_can_not_be_is_refused_with_a_reason(site: Dashboard, form: dict[str, str]) -> None:
    visitor = await site.visitor("owner")
    answer = await visitor.post(site.path("/keys"), **({"name": "ci"} | form))
    assert answer.status == 400
    assert 'role="alert"' in answer.body.decode()
    assert provisioning.list_keys(site.database, site.account_id) == []


async def test_budgets_are_set_and_removed(site: Dashboard) -> None:
    visitor = await site.visitor("billing")
    await visitor.get(site.path("/limits"))
    assert (await visitor.post(site.path("/budgets"), limit="12.50", period="month", hard="1")).status == 303
    page = text_of(await visitor.get(site.path("/limits")))
    assert "$12.50" in page
    (standing,) = site.services.budgets.standings(site.account_id, None)
    assert (standing.budget.hard, standing.budget.limit_nano) == (True, 12_500_000_000)
    assert (await visitor.post(site.path(f"/budgets/{standing.budget.id}/remove"))).status == 303
    assert site.services.budgets.standings(site.account_id, None) == []


@pytest.mark.parametrize(
    "form",
    [{"limit": "-1"}, {"limit": "1e3"}, {"limit": "1", "period": "week"}, {"limit": "9999999"}, {"limit": ""}],
)
async def test_a_budget_that_can_not_be_is_refused_with_a_reason(site: Dashboard, form: dict[str, str]) -> None:
    visitor = await site.visitor("owner")
    answer = await visitor.post(site.path("/budgets"), **({"period": "day"} | form))
    assert (answer.status, 'role="alert"' in answer.body.decode()) == (400, True)


def _booking(page: str) -> str:
    found = re.search(r'name="booking" value="([^"]+)"', page)
    assert found
    return found[1]


async def test_an_operator_books_money_once_however_often_the_form_is_sent(site: Dashboard) -> None:
    operator = await site.visitor("operator")
    page = await operator.get(site.path("/credits"))
    form = {"booking": _booking(page.body.decode()), "amount": "250.00", "kind": "top-up", "memo": "Transfer 17"}
    for _ in range(2):
        assert (await operator.post(site.path("/credits"), **form)).status == 303
    assert site.services.wallets.show(site.account_id).wallet_nano == 250_000_000_000
    assert "Transfer 17" in text_of(await operator.get(site.path("/credits")))
    changed = await operator.post(site.path("/credits"), **(form | {"amount": "2500.00"}))
    assert (changed.status, "was used for something else" in text_of(changed)) == (400, True)
    assert _booking(changed.body.decode()) != form["booking"]
    (entry,) = read_audit_log(site.database, site.account_id, limit=1)
    assert (entry.action, entry.actor_id) == ("wallet.top_up", site.users["operator"].id)


async def test_a_payment_lessens_what_is_owed_and_leaves_the_balance(site: Dashboard) -> None:
    operator = await site.visitor("operator")
    page = await operator.get(site.path("/credits"))
    form = {"booking": _booking(page.body.decode()), "amount": "10", "kind": "payment"}
    assert (await operator.post(site.path("/credits"), **form)).status == 303
    view = site.services.wallets.show(site.account_id)
    assert (view.wallet_nano, view.owed_nano) == (0, -10_000_000_000)


@pytest.mark.parametrize(
    "form", [{"amount": "-1"}, {"amount": "0"}, {"amount": "1e9"}, {"memo": "a\nb"}, {"booking": ""}]
)
async def test_money_that_can_not_be_booked_is_refused_with_a_reason(site: Dashboard, form: dict[str, str]) -> None:
    operator = await site.visitor("operator")
    await operator.get(site.path("/credits"))
    sent = {"booking": "b-1", "amount": "5", "kind": "top-up"} | form
    answer = await operator.post(site.path("/credits"), **sent)
    assert (answer.status, 'role="alert"' in answer.body.decode()) == (400, True)
    assert site.services.wallets.show(site.account_id).wallet_nano == 0


@pytest.mark.parametrize("who", ["owner", "billing"])
async def test_a_customer_books_no_money_into_its_own_account(site: Dashboard, who: str) -> None:
    visitor = await site.visitor(who)
    assert "booking" not in (await visitor.get(site.path("/credits"))).body.decode()
    answer = await visitor.post(site.path("/credits"), booking="b-1", amount="5", kind="top-up")
    assert answer.status == 404
    assert site.services.wallets.show(site.account_id).wallet_nano == 0


async def test_another_accounts_key_can_not_be_budgeted_or_revoked(site: Dashboard) -> None:
    outsider = await site.visitor("outsider")
    await outsider.get(site.path("/keys", site.other_id))
    await outsider.post(site.path("/keys", site.other_id), name="theirs")
    (theirs,) = provisioning.list_keys(site.database, site.other_id)
    owner = await site.visitor("owner")
    assert (await owner.post(site.path("/budgets"), limit="1", period="day", key=theirs.id)).status == 404
    assert (await owner.post(site.path(f"/keys/{theirs.id}/revoke"))).status == 404
    assert provisioning.get_key(site.database, site.other_id, theirs.id).revoked_at_ns is None


async def test_members_change_and_the_last_owner_stays(site: Dashboard) -> None:
    owner = await site.visitor("owner")
    viewer, self = site.users["viewer"], site.users["owner"]
    assert (await owner.post(site.path(f"/members/{viewer.id}"), role="billing")).status == 303
    assert (await owner.post(site.path(f"/members/{viewer.id}"), remove="1")).status == 303
    refused = await owner.post(site.path(f"/members/{self.id}"), role="viewer")
    assert (refused.status, "at least one owner" in text_of(refused)) == (400, True)
    admin = await site.visitor("admin")
    page = await admin.get(site.path("/members"))
    assert f"/members/{self.id}" not in page.body.decode()
    assert (await admin.post(site.path(f"/members/{self.id}"), remove="1")).status == 400


async def test_an_open_invitation_is_counted_and_withdrawn(site: Dashboard) -> None:
    admin = await site.visitor("admin")
    assert "Open invitations" not in (await admin.get(site.path("/members"))).body.decode()
    invited = await admin.post(site.path("/members/invite"), email="eve@example.com", role="viewer")
    assert "Open invitations: 1" in invited.body.decode()
    assert (await admin.post(site.path("/members/withdraw"))).status == 303
    assert "Open invitations" not in (await admin.get(site.path("/members"))).body.decode()


async def test_models_show_the_price_that_is_charged_and_what_was_measured_of_them(site: Dashboard) -> None:
    visitor = await site.visitor("viewer")
    card = replace(CARD, price=CARD.id, id="@cf/test/deployed", quality={"top-1 agreement with bf16": "0.97"})
    services = replace(site.services, catalogue=Catalogue([card]), registry=CollectorRegistry())
    page = text_of(await Visitor(create_app(services), cookies=visitor.cookies).get(site.path("/models")))
    assert "@cf/test/deployed" in page
    assert "Input $0.95" in page
    assert "top-1 agreement with bf16 0.97" in page


async def test_no_name_that_users_give_is_more_than_text(site: Dashboard) -> None:
    visitor = await site.visitor("operator")
    await visitor.get(site.path("/keys"))
    await visitor.post(site.path("/keys"), name=XSS)
    await visitor.post(site.path("/budgets"), limit="1", period="day", model=XSS.replace(" ", ""))
    await visitor.post(site.path("/members/invite"), email=f"{XSS.replace(' ', '')[:40]}@example.com", role="viewer")
    provisioning.open_account(site.database, XSS, clock=lambda: 5)
    for path in (
        *(site.path(tail) for tail in ("", "/keys", "/usage", "/requests", "/limits", "/members", "/audit")),
        *(f"/dashboard/operator/{tail}" for tail in ("tenants?everything=1", "audit", "users", "prices")),
        site.path("/usage?model=%3Cscript%3Ealert(1)%3C/script%3E"),
        site.path("/requests?outcome=%22%3E%3Cscript%3E"),
        "/dashboard/sign-in?next=%22%3E%3Cscript%3E",
        "/dashboard/%3Cscript%3Ealert(1)%3C/script%3E",
    ):
        html = (await visitor.get(path)).body.decode()
        assert "<script>alert" not in html, path
        assert "<img src=x" not in html, path
        assert '"><script>' not in html, path
        assert "49" not in html or "{{7*7}}" not in html.replace("{{7*7}}", "", 10), path
    assert "&lt;script&gt;" in (await visitor.get(site.path("/keys"))).body.decode()


async def test_without_the_fetched_scripts_a_page_says_so_and_works(
    site: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor = await site.visitor("owner")
    assert "scripts are not installed" not in text_of(await visitor.get(site.path()))
    monkeypatch.setattr("api.dashboard.assets._TYPES", {".css": "text/css", ".svg": "image/svg+xml"})
    monkeypatch.setattr("api.dashboard.app.read_assets", Assets)
    services = replace(site.services, registry=CollectorRegistry())
    bare = Visitor(create_app(services), cookies=visitor.cookies)
    page = await bare.get(site.path())
    assert page.status == 200
    assert "scripts are not installed" in text_of(page)
    assert "<script src" not in page.body.decode()


async def test_a_template_is_compiled_once_a_process(site: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    visitor = await site.visitor("owner")
    page = await visitor.get(site.path())
    monkeypatch.setattr("jinja2.Environment.compile", None)
    services = replace(site.services, registry=CollectorRegistry())
    another = Visitor(create_app(services), cookies=visitor.cookies)
    assert (await another.get(site.path())).status == page.status == 200
