"""The numbers on the pages: those of the API and of the ledger, whatever the filter and the browser's time zone."""

import re
import time
from decimal import Decimal
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visit
from tests.browser.site import Site

pytestmark = pytest.mark.browser

_ZONES = ("America/Los_Angeles", "UTC", "Asia/Kolkata", "Asia/Tokyo")


def _totals(page: Page) -> list[str]:
    values: list[str] = page.locator("#totals data").evaluate_all("all => all.map((one) => one.value)")
    return values


def _of_api(page: Page, site: Site) -> list[str]:
    """What the call that the page names answers."""
    said = page.locator("code", has_text="GET /console/v1").inner_text()
    found = re.search(r"/usage\?\S+", said)
    assert found
    totals: dict[str, Any] = site.console(found[0])["totals"]
    tokens = totals["prompt_tokens"] + totals["completion_tokens"]
    counts = [totals["requests"], totals["prompt_tokens"], totals["cached_tokens"], totals["completion_tokens"], tokens]
    return [*map(str, counts), totals["neurons"], totals["cost"]]


def test_filters_change_address_table_and_chart_to_what_the_api_says(site: Site, visit: Visit) -> None:
    page = visit("viewer")
    page.goto(site.account("/usage"))
    assert _totals(page) == _of_api(page, site)
    for label, value, parameter in (
        ("Group by", "key", "by=key"),
        ("Only this model", "@cf/moonshotai/kimi-k2.6", "model=%40cf"),
        ("Only this outcome", "finished", "outcome=finished"),
        ("Show", "tokens", "measure=tokens"),
    ):
        with page.expect_response(re.compile(r"/usage\?")):
            page.get_by_label(label, exact=True).select_option(value)
        page.wait_for_url(re.compile(re.escape(parameter)))
        page.locator("#totals").wait_for()
        assert _totals(page) == _of_api(page, site)
        rows = page.locator("#groups tbody tr")
        each = [Decimal(rows.nth(row).locator("data").last.get_attribute("value") or "") for row in range(rows.count())]
        assert sum(each) == Decimal(_totals(page)[-1])
    here, shown = page.url, _totals(page)
    page.reload()
    assert _totals(page) == shown
    page.get_by_role("link", name="7 days").click()
    page.wait_for_url(lambda url: url != here)
    page.go_back()
    assert page.url == here
    assert _totals(page) == shown


def test_a_chart_is_drawn_and_read_under_the_pointer(site: Site, visit: Visit) -> None:
    page = visit("viewer")
    page.goto(site.account("/usage"))
    canvas = page.locator(".chart canvas")
    canvas.wait_for()
    box = canvas.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2)
    readout = page.locator("#usage-data-readout")
    assert re.match(r"20\d\d-\d\d-\d\d: .*\$", readout.inner_text())


def test_days_are_utc_wherever_the_browser_is(site: Site, visit: Visit) -> None:
    seen = []
    for zone in _ZONES:
        page = visit("viewer", timezone_id=zone)
        page.goto(site.account("/usage?measure=requests&step=day&by=model"))
        canvas = page.locator(".chart canvas")
        canvas.wait_for()
        box = canvas.bounding_box()
        assert box
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
        readout = page.locator("#usage-data-readout").inner_text()
        page.get_by_label("Only this outcome", exact=True).select_option("finished")
        page.wait_for_url(re.compile("outcome=finished"))
        page.locator("#totals").wait_for()
        pixels = page.evaluate("document.querySelector('.chart canvas').toDataURL()")
        seen.append((readout, _totals(page), page.locator("#from").input_value(), len(pixels) > 1_000))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert seen[0][3]


def test_pages_api_and_ledger_agree(site: Site, visit: Visit) -> None:
    """Over everything that was ever used: the usage page, the API, and what the ledger says is owed."""
    site.chat("Say hello.")
    page = visit("operator")
    page.goto(site.account("/usage?measure=cost"))
    now = page.locator("#to").input_value()
    usage = site.console(f"/usage?from=0&to={now}")["totals"]
    events = site.console(f"/usage?from=0&to={now}&group_by=day")["groups"]
    assert sum(Decimal(day["cost"]) for day in events) == Decimal(usage["cost"])
    page.goto(f"{site.account('/usage')}?from=2026-01-01T00:00:00&to={now}&step=day&by=key")
    assert _totals(page)[-1] == usage["cost"]
    page.goto(site.account("/credits"))
    owed = page.locator("#owed data").first.get_attribute("value")
    assert owed == usage["cost"] == site.console("/wallet")["owed"]
    page.goto(f"{site.url}/dashboard/operator/invariants")
    page.get_by_text("Nothing contradicts itself.").wait_for()
    page.goto(site.account())
    spent = page.locator("#spent data").get_attribute("value")
    assert spent == site.console(f"/costs?from={_month_start()}&to={now}")["totals"]["cost"]


def _month_start() -> str:
    return time.strftime("%Y-%m-01", time.gmtime())


def test_the_log_leads_to_a_request_whose_lines_add_up(site: Site, visit: Visit) -> None:
    page = visit("billing")
    page.goto(site.account("/requests?outcome=finished"))
    page.locator("#requests tbody a").first.click()
    page.get_by_role("heading", name="Cost, line by line").wait_for()
    table = page.get_by_role("table").first
    lines = [
        Decimal(table.locator("tbody tr").nth(row).locator("data").last.get_attribute("value") or "")
        for row in range(table.locator("tbody tr").count())
    ]
    assert sum(lines) == Decimal(page.locator("#cost data").get_attribute("value") or "")
    page.get_by_role("link", name="All requests").click()
    page.get_by_role("link", name="Older").click()
    page.wait_for_url(re.compile("before="))
    expect(page.locator("#requests tbody tr")).to_have_count(50)
