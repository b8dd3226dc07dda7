"""Signing in by password and by link, invitations, one's own password, and the theme."""

import re
import time

import pytest

from tenancy import people
from tenancy.audit_log import COMMAND_LINE
from tenancy.roles import Role
from tenancy.sign_in import ATTEMPTS_MAX, make_sign_in_link
from tests.api.dashboard.visitors import Dashboard, Visitor, text_of
from tests.tenancy.people import PASSWORD, cheap_passwords

NEW = "another horse, another battery"


def _set_password(site: Dashboard, who: str) -> None:
    with cheap_passwords() as passwords:
        kept = passwords.hash_now(PASSWORD)
    people.set_password(site.database, site.users[who].id, kept, by=COMMAND_LINE, clock=time.time_ns)


async def _sign_in(visitor: Visitor, password: str = PASSWORD, **form: str) -> int:
    answer = await visitor.post("/dashboard/sign-in", email="owner@example.com", password=password, **form)
    return answer.status


async def test_the_right_password_leads_to_the_page_that_was_asked_for(site: Dashboard) -> None:
    _set_password(site, "owner")
    visitor = site.stranger()
    asked = await visitor.get(site.path("/usage?step=day"))
    assert asked.status == 303
    form = await visitor.get(asked.headers["location"])
    assert f'value="{site.path("/usage?step=day")}"' in form.body.decode()
    answer = await visitor.post(
        "/dashboard/sign-in", email="Owner@Example.com", password=PASSWORD, next=site.path("/usage?step=day")
    )
    assert (answer.status, answer.headers["location"]) == (303, site.path("/usage?step=day"))
    assert (await visitor.get(site.path("/usage"))).status == 200
    assert (await visitor.get("/dashboard/sign-in")).status == 303


async def test_a_wrong_password_and_an_unknown_user_read_the_same(site: Dashboard) -> None:
    _set_password(site, "owner")
    said = set()
    for email, password in (("owner@example.com", "wrong"), ("nobody@example.com", PASSWORD)):
        answer = await site.stranger().post("/dashboard/sign-in", email=email, password=password)
        assert answer.status == 401
        said.add(text_of(answer))
    assert len(said) == 1
    assert "is wrong" in said.pop()


async def test_a_new_session_takes_the_place_of_the_one_that_was_there(site: Dashboard) -> None:
    _set_password(site, "owner")
    visitor = await site.visitor("viewer")
    old = dict(visitor.cookies)
    assert await _sign_in(visitor) == 303
    assert visitor.cookies != old
    visitor.cookies = old
    assert (await visitor.get(site.path())).status == 303


async def test_guessing_is_told_to_wait(site: Dashboard) -> None:
    _set_password(site, "owner")
    for _ in range(ATTEMPTS_MAX["user and address"]):
        assert await _sign_in(site.stranger(), "wrong") == 401
    answer = await site.stranger().post("/dashboard/sign-in", email="owner@example.com", password=PASSWORD)
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 60
    assert "Too many attempts" in text_of(answer)


async def test_looking_at_a_link_uses_nothing_and_following_it_works_once(site: Dashboard) -> None:
    token = make_sign_in_link(site.database, site.users["viewer"], by=COMMAND_LINE, clock=time.time_ns)
    visitor = site.stranger()
    for _ in range(2):
        assert (await visitor.get(f"/dashboard/link/{token}")).status == 200
    assert (await visitor.post(f"/dashboard/link/{token}")).status == 303
    home = await visitor.get("/dashboard")
    assert home.headers["location"] == site.path()
    spent = await site.stranger().get(f"/dashboard/link/{token}")
    assert spent.status == 404
    assert "This link is spent" in text_of(spent)
    assert (await site.stranger().post(f"/dashboard/link/{token}")).status == 404


async def test_an_invitation_makes_a_user_who_is_signed_in_at_once(site: Dashboard) -> None:
    admin = await site.visitor("admin")
    await admin.get(site.path("/members"))
    made = await admin.post(site.path("/members/invite"), email="new@example.com", role="billing")
    (link,) = re.findall(r"/dashboard/link/[\w-]+", made.body.decode())
    visitor = site.stranger()
    page = await visitor.get(link)
    assert "new@example.com is invited to acme as billing" in text_of(page)
    weak = await visitor.post(link, name="New", password="short")
    assert (weak.status, "12 to 256 characters" in text_of(weak)) == (400, True)
    joined = await visitor.post(link, name="New", password=NEW)
    assert (joined.status, joined.headers["location"]) == (303, site.path())
    assert (await visitor.get(site.path("/credits"))).status == 200
    assert (await site.stranger().get(link)).status == 404
    again = site.stranger()
    assert (await again.post("/dashboard/sign-in", email="new@example.com", password=NEW)).status == 303


async def test_an_invited_user_that_exists_joins_by_signing_in(site: Dashboard) -> None:
    token = people.invite(
        site.database, site.account_id, "outsider@example.com", Role.VIEWER, by=COMMAND_LINE, clock=time.time_ns
    )
    link = f"/dashboard/link/{token}"
    squatter = await site.stranger().post(link, name="Eve", password=NEW)
    assert squatter.status == 400
    outsider = await site.visitor("outsider")
    assert "Join" in text_of(await outsider.get(link))
    assert (await outsider.post(link)).headers["location"] == site.path()
    assert people.role_in(site.database, site.account_id, site.users["outsider"].id) is Role.VIEWER


async def test_a_new_password_ends_the_other_sessions_and_keeps_this_one(site: Dashboard) -> None:
    _set_password(site, "owner")
    here, elsewhere = await site.visitor("owner"), await site.visitor("owner")
    wrong = await here.post("/dashboard/profile/password", old="wrong", new=NEW)
    assert (wrong.status, "old password is wrong" in text_of(wrong)) == (400, True)
    weak = await here.post("/dashboard/profile/password", old=PASSWORD, new="aaaaaaaaaaaaaaa")
    assert weak.status == 400
    assert (await here.post("/dashboard/profile/password", old=PASSWORD, new=NEW)).status == 303
    assert (await here.get("/dashboard/profile?changed=1")).status == 200
    assert (await elsewhere.get("/dashboard/profile")).status == 303
    assert await _sign_in(site.stranger(), NEW) == 303


async def test_a_user_without_a_password_sets_a_first_one(site: Dashboard) -> None:
    visitor = await site.visitor("viewer")
    assert "Set a password" in text_of(await visitor.get("/dashboard/profile"))
    assert (await visitor.post("/dashboard/profile/password", new=NEW)).status == 303


@pytest.mark.parametrize(("chosen", "shown"), [("dark", ' data-theme="dark"'), ("light", ' data-theme="light"')])
async def test_a_theme_is_remembered(site: Dashboard, chosen: str, shown: str) -> None:
    visitor = site.stranger()
    assert "data-theme" not in (await visitor.get("/dashboard/sign-in")).body.decode()
    await visitor.post("/dashboard/theme", theme=chosen, next="/dashboard/sign-in")
    assert shown in (await visitor.get("/dashboard/sign-in")).body.decode()
    await visitor.post("/dashboard/theme", theme="<script>", next="/dashboard/sign-in")
    assert shown in (await visitor.get("/dashboard/sign-in")).body.decode()
