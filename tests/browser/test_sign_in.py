"""Signing in and out as people do, with the keyboard too."""

import pytest

from tests.browser.conftest import Visit
from tests.browser.site import PASSWORD, Site

pytestmark = pytest.mark.browser


def test_a_password_leads_to_the_page_that_was_asked_for_and_out_again(site: Site, visit: Visit) -> None:
    page = visit(None)
    page.goto(site.account("/usage"))
    assert "/dashboard/sign-in" in page.url
    page.get_by_label("Email address").fill("billing@example.com")
    page.get_by_label("Password").fill("not the password")
    page.get_by_role("button", name="Sign in").click()
    assert "is wrong" in page.get_by_role("alert").inner_text()
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Usage", exact=True).wait_for()
    assert page.url == site.account("/usage")
    cookie = next(one for one in page.context.cookies() if one["name"] == "pagegate_session")
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
    assert page.evaluate("document.cookie").find("pagegate_session") == -1
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    page.go_back()
    page.get_by_role("heading", name="Sign in").wait_for()


def test_the_keyboard_alone_is_enough(site: Site, visit: Visit) -> None:
    page = visit(None)
    page.goto(f"{site.url}/dashboard/sign-in")
    for text in ("viewer@example.com", PASSWORD):
        page.keyboard.type(text)
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Overview").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_a_link_signs_in_once(site: Site, visit: Visit) -> None:
    link = site.link("developer")
    page = visit(None)
    page.goto(link)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("heading", name="Overview").wait_for()
    again = visit(None)
    again.goto(link)
    again.get_by_role("heading", name="This link is spent").wait_for()
