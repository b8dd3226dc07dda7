"""Who may see and change what: each route by each role, foreign accounts, forms from elsewhere, cookies, headers."""

import re
from pathlib import Path

import pytest

from api.dashboard.access import Need, own_path
from api.dashboard.app import dashboard_routes
from api.dashboard.pages import Guarded
from tenancy.roles import OPERATOR_RIGHTS, RIGHTS, Right, Role
from tests.api.dashboard.visitors import ORIGIN, Dashboard, dashboard, set_cookies, text_of

_NOBODY = "0" * 32


def _guarded(site: Dashboard) -> list[tuple[str, str, Need | Right]]:
    """(method, path, what it needs) of every page and form."""
    found = []
    for route in dashboard_routes(site.services):
        guard = getattr(route.endpoint, "__self__", None)
        if isinstance(guard, Guarded):
            method = "POST" if "POST" in (route.methods or ()) else "GET"
            found.append((method, route.path, guard.need))
    assert len(found) > 30
    return found


def _filled(site: Dashboard, path: str, account_id: str | None = None) -> str:
    values = {"account_id": account_id or site.account_id, "deed": "revoke"}
    return re.sub(r"\{(\w+)(:path)?\}", lambda match: values.get(match[1], _NOBODY), path)


async def test_every_page_sends_who_is_not_signed_in_to_sign_in(site: Dashboard) -> None:
    for method, path, need in _guarded(site):
        if need is Need.NOTHING:
            continue
        visitor = site.stranger()
        filled = _filled(site, path)
        answer = await (visitor.get(filled) if method == "GET" else visitor.post(filled))
        assert answer.status == 303, path
        assert answer.headers["location"].startswith("/dashboard/sign-in")


@pytest.mark.load
@pytest.mark.parametrize("who", [*(role.value for role in Role), "operator"])
async def test_every_page_of_an_account_obeys_the_roles(site: Dashboard, who: str) -> None:
    rights = OPERATOR_RIGHTS if who == "operator" else RIGHTS[Role(who)]
    visitor = await site.visitor(who)
    for method, path, need in _guarded(site):
        if not isinstance(need, Right):
            continue
        filled = _filled(site, path)
        answer = await (visitor.get(filled) if method == "GET" else visitor.post(filled))
        if need in rights:
            assert answer.status != 403, (who, path)
            assert answer.status < 500, (who, path)
        else:
            assert answer.status == 403, (who, path)
            assert "does not allow" in text_of(answer)


async def test_what_is_the_operators_is_unknown_to_others(site: Dashboard) -> None:
    owner, operator = await site.visitor("owner"), await site.visitor("operator")
    for method, path, need in _guarded(site):
        if need is Need.OPERATOR and method == "GET" and not path.endswith("/events"):
            assert (await owner.get(path)).status == 404, path
            assert (await operator.get(path)).status == 200, path


async def test_another_account_is_as_unknown_as_one_that_does_not_exist(site: Dashboard) -> None:
    visitor = await site.visitor("owner")
    for method, path, need in _guarded(site):
        if not isinstance(need, Right):
            continue
        said = set()
        for account_id in (site.other_id, _NOBODY, "not-an-id"):
            filled = _filled(site, path, account_id)
            answer = await (visitor.get(filled) if method == "GET" else visitor.post(filled))
            # The theme's form names the page it is on; nothing else may differ.
            said.add((answer.status, answer.body.decode().replace(account_id, "").partition("Data as of")[0]))
        assert len(said) == 1, path
        assert said.pop()[0] == 404


async def test_the_menu_shows_what_a_role_may_open(site: Dashboard) -> None:
    viewer = await (await site.visitor("viewer")).get(site.path())
    owner = await (await site.visitor("owner")).get(site.path())
    for entry in ("/credits", "/members", "/playground"):
        assert f'href="{site.path(entry)}"' not in viewer.body.decode()
        assert f'href="{site.path(entry)}"' in owner.body.decode()


async def test_a_form_without_its_sessions_token_changes_nothing(site: Dashboard) -> None:
    visitor, other = await site.visitor("owner"), await site.visitor("admin")
    for token in ("", "0" * 64, other.form_token):
        answer = await visitor.post(site.path("/budgets"), token=token, limit="1", period="day")
        assert answer.status == 403
        assert "was not made by a page of your session" in text_of(answer)
    assert site.services.budgets.standings(site.account_id, None) == []
    assert (await visitor.post(site.path("/budgets"), limit="1", period="day")).status == 303
    assert len(site.services.budgets.standings(site.account_id, None)) == 1


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://gate.example.evil.example", ""])
async def test_a_form_from_another_origin_changes_nothing(site: Dashboard, origin: str | None) -> None:
    visitor = await site.visitor("owner")
    assert (await visitor.post(site.path("/budgets"), origin=origin, limit="1", period="day")).status == 403
    assert (await site.stranger().post("/dashboard/sign-in", origin=origin, email="a@b", password="x")).status == 403
    assert site.services.budgets.standings(site.account_id, None) == []


async def test_a_form_beyond_its_bound_is_refused(site: Dashboard) -> None:
    visitor = await site.visitor("owner")
    assert (await visitor.post(site.path("/keys"), name="x" * 70_000)).status == 413
    assert (await visitor.post(site.path("/keys"), **{f"field{number}": "x" for number in range(101)})).status == 403


async def test_the_session_is_out_of_reach_of_scripts_and_other_sites(site: Dashboard) -> None:
    visitor = site.stranger()
    await visitor.post("/dashboard/sign-in", email="owner@example.com", password="no password is set")
    assert visitor.cookies == {}
    visitor = await site.visitor("owner")
    assert list(visitor.cookies) == ["pagegate_session"]
    answer = await visitor.post("/dashboard/sign-out")
    (line,) = set_cookies(answer)
    assert "HttpOnly" in line
    assert "SameSite=lax" in line
    assert "Path=/" in line
    assert "Secure" not in line


async def test_behind_tls_the_session_is_for_this_host_and_tls_alone(tmp_path: Path, migrated_file: Path) -> None:
    with dashboard(tmp_path, migrated_file, trusted_proxies="127.0.0.0/8") as site:
        visitor = site.stranger()
        answer = await visitor.get("/dashboard/sign-in")
        assert answer.status == 200
        visitor = await site.visitor("owner")
        assert list(visitor.cookies) == ["pagegate_session"]
        secure = await site.stranger().get("/dashboard", **{"x-forwarded-proto": "https"})
        assert secure.status == 303
        signed_in = await site.visitor("owner", **{"x-forwarded-proto": "https"})
        assert list(signed_in.cookies) == ["__Host-pagegate_session"]
        assert "Secure" in signed_in.last_cookie


async def test_whoever_says_https_without_being_a_proxy_is_not_believed(site: Dashboard) -> None:
    visitor = await site.visitor("owner", **{"x-forwarded-proto": "https"})
    assert list(visitor.cookies) == ["pagegate_session"]


async def test_every_page_forbids_scripts_from_elsewhere_and_frames(site: Dashboard) -> None:
    visitor = await site.visitor("operator")
    for path in ("/dashboard/profile", site.path(), site.path("/usage"), "/dashboard/operator", "/dashboard/nothing"):
        answer = await visitor.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        html = answer.body.decode()
        assert " style=" not in html
        assert not re.search(r"\son\w+=", html)
        assert not re.search(r"<script(?![^>]*(src=|application/json))", html)


async def test_a_session_that_was_ended_opens_nothing(site: Dashboard) -> None:
    visitor = await site.visitor("owner")
    cookies = dict(visitor.cookies)
    await visitor.post("/dashboard/sign-out")
    assert visitor.cookies == {}
    visitor.cookies = cookies
    assert (await visitor.get(site.path())).headers["location"].startswith("/dashboard/sign-in")


@pytest.mark.parametrize(
    "path",
    [
        "https://evil.example",
        "//evil.example/dashboard",
        "/dashboard\\@evil",
        "javascript:alert(1)",
        "/v1/models",
        "/\\evil",
        "/dashboard\n",
    ],
)
def test_nobody_is_sent_away_after_signing_in(path: str) -> None:
    assert own_path(path) == "/dashboard"


def test_a_page_that_was_asked_for_is_where_signing_in_leads() -> None:
    assert own_path("/dashboard/a/x/usage?from=1") == "/dashboard/a/x/usage?from=1"
    assert ORIGIN.startswith("http")
