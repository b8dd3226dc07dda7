"""The operator's live page while requests run: figures move within two seconds, and nothing else does."""

import re
import threading
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route

from tests.browser.conftest import Visit
from tests.browser.site import Site

pytestmark = pytest.mark.browser


def _boxes(page: Page) -> list[list[float]]:
    """Where everything that has a place of its own lies."""
    found: list[list[float]] = page.evaluate(
        "[...document.querySelectorAll('h1, h2, .stat, .panel, .bar, .chart')].map((one) => {"
        " const box = one.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; })"
    )
    return found


def test_pages_in_use_are_seen_as_they_move(site: Site, visit: Visit, picture: Callable[[Page, str], None]) -> None:
    page = visit("operator")
    page.goto(f"{site.url}/dashboard/operator")
    page.locator(".live[data-state=on]").wait_for()
    before = _boxes(page)
    load = [threading.Thread(target=site.chat, args=(f"Tell me story {n}.",), kwargs={"tokens": 60}) for n in range(6)]
    for one in load:
        one.start()
    used = page.locator("#live-used data").first
    deadline = time.monotonic() + 20
    while used.get_attribute("value") == "0":
        assert time.monotonic() < deadline, "pages in use were never seen"
        time.sleep(0.05)
    shown = int(used.get_attribute("value") or "0")
    assert shown > 0
    picture(page, "live-under-load")
    during = _boxes(page)
    assert len(during) == len(before)
    assert all(
        abs(one - other) < 1 for a, b in zip(before, during, strict=True) for one, other in zip(a, b, strict=True)
    )
    as_of = page.locator("#figures .asof time")
    moments = set()
    until = time.monotonic() + 6
    while time.monotonic() < until:
        moments.add(as_of.get_attribute("datetime"))
        time.sleep(0.1)
    assert len(moments) >= 3, "the page is at most two seconds old"
    for one in load:
        one.join(60)
    page.locator("#live-running data[value='0']").first.wait_for()


def test_a_page_is_live_though_scripts_come_late(site: Site, visit: Visit) -> None:
    page = visit("operator")

    def late(route: Route) -> None:
        time.sleep(0.5)  # what is served meanwhile has long run
        route.continue_()

    page.route(re.compile("(hx-sse|dashboard)[^/]*js"), late)
    page.goto(f"{site.url}/dashboard/operator", wait_until="commit")
    page.locator(".live[data-state=on]").wait_for()


def test_the_page_is_of_use_without_scripts(site: Site, visit: Visit) -> None:
    page = visit("operator", java_script_enabled=False)
    page.goto(f"{site.url}/dashboard/operator")
    assert re.search(r"of \d+", page.locator("#live-used").inner_text())
