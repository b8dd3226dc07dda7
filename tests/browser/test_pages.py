"""Every page in both themes and on a phone: drawn without a complaint, and usable by everybody (axe)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from billing.budgets import BudgetPeriod, Budgets
from tests.browser.conftest import Visit
from tests.browser.site import Site

pytestmark = pytest.mark.browser

_AXE = Path(__file__).parent / "vendor" / "axe.min.js"
_ACCOUNT = (
    "",
    "/usage",
    "/requests",
    "/batches",
    "/models",
    "/keys",
    "/projects",
    "/service-accounts",
    "/limits",
    "/credits",
    "/invoices",
    "/members",
    "/audit",
)
_OPERATOR = ("", "/tenants", "/backends", "/prices", "/users", "/audit", "/invariants")
_PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1}


def violations(page: Page) -> list[str]:
    """What axe finds: rule and first element of each."""
    if not page.evaluate("typeof axe !== 'undefined'"):
        page.evaluate(_AXE.read_text())
    found: list[dict[str, Any]] = page.evaluate("axe.run().then((result) => result.violations)")
    return [f"{one['id']}: {one['nodes'][0]['html'][:160]} ({one['nodes'][0]['failureSummary']})" for one in found]


def _paths(site: Site) -> dict[str, str]:
    account = {f"account{tail.replace('/', '-') or '-overview'}": site.account(tail) for tail in _ACCOUNT}
    operator = {
        f"operator{tail.replace('/', '-') or '-live'}": f"{site.url}/dashboard/operator{tail}" for tail in _OPERATOR
    }
    return account | operator | {"profile": f"{site.url}/dashboard/profile"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_drawn_and_usable_by_everybody(
    site: Site, visit: Visit, picture: Callable[[Page, str], None], theme: str
) -> None:
    page = visit("operator", color_scheme=theme, reduced_motion="reduce")
    wrong = {}
    for name, path in _paths(site).items():
        answer = page.goto(path)
        assert answer is not None
        assert answer.status == 200, path
        assert "UTC" in page.locator(".asof").first.inner_text()
        found = violations(page)
        if found:
            wrong[name] = found
        picture(page, f"{theme}-{name}")
    page.goto(site.account("/requests"))
    page.locator("#requests tbody a").first.click()
    page.get_by_role("heading", name="Timeline").wait_for()
    wrong["request"] = violations(page)
    picture(page, f"{theme}-request")
    page.goto(f"{site.url}/dashboard/nothing")
    page.get_by_role("heading", name="Not found").wait_for()
    wrong["unknown"] = violations(page)
    player = visit("developer", color_scheme=theme)
    player.goto(site.account("/playground"))
    wrong["playground"] = violations(player)
    stranger = visit(None, color_scheme=theme)
    stranger.goto(f"{site.url}/dashboard/sign-in")
    wrong["sign-in"] = violations(stranger)
    picture(stranger, f"{theme}-sign-in")
    assert {name: found for name, found in wrong.items() if found} == {}


def test_no_page_is_wider_than_a_phone(site: Site, visit: Visit, picture: Callable[[Page, str], None]) -> None:
    page = visit("operator", **_PHONE)
    for name, path in _paths(site).items():
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0, name
        if name in {"account-overview", "operator-live"}:
            picture(page, f"phone-{name}")


# At 1,200 pixels these do not fit once they hold what other tests leave there: long names, batches, forms of a key.
_WIDE = {"account-batches", "account-keys", "account-requests", "operator-audit", "operator-prices"}


@pytest.mark.parametrize(("width", "scrolled"), [(1200, _WIDE), (1920, set())], ids=["1200", "1920"])
def test_tables_fit_on_a_desk(site: Site, visit: Visit, width: int, scrolled: set[str]) -> None:
    budgets = Budgets(site.database, clock=time.time_ns)
    model = "@cf/huggingfacetb/smollm2-135m-instruct"
    budget = budgets.add(site.account_id, 25_000_000_000, BudgetPeriod.MONTH, model=model).budget
    page = visit("operator", viewport={"width": width, "height": 900})
    cut = "[...document.querySelectorAll('.table')].some((one) => one.scrollWidth > one.clientWidth)"
    found = set()
    for name, path in _paths(site).items():
        page.goto(path)
        if page.evaluate(cut):
            found.add(name)
    budgets.remove(site.account_id, budget.id)
    assert found <= scrolled


def test_the_theme_follows_the_choice_over_the_system(site: Site, visit: Visit) -> None:
    page = visit("viewer", color_scheme="light")
    page.goto(site.account())
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Dark").click()
    page.get_by_role("button", name="Light").wait_for()
    assert page.evaluate(ground) != light
    page.goto(site.account("/keys"))
    assert page.evaluate(ground) != light
    page.get_by_role("button", name="Light").click()
    page.get_by_role("button", name="Dark").wait_for()
    assert page.evaluate(ground) == light


def test_tables_and_forms_work_without_scripts(site: Site, visit: Visit) -> None:
    page = visit("developer", java_script_enabled=False)
    page.goto(site.account("/usage"))
    page.get_by_label("Group by").select_option("key")
    page.get_by_role("button", name="Show").click()
    assert "by=key" in page.url
    assert page.locator("#groups tbody tr").count() >= 3
    page.goto(site.account("/keys"))
    page.get_by_label("Name").fill("made without scripts")
    page.get_by_role("button", name="Issue").click()
    assert page.locator("#key-text").inner_text().startswith("pgi_live_")
