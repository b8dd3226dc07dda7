"""What people do on the pages: keys, budgets, the playground on the real engine; and what roles keep from whom."""

import json
import re
import time
import urllib.error
import urllib.request

import pytest
from playwright.sync_api import Page

from billing.usage import TokenUsage
from gateway.batches.batch import LineState
from gateway.batches.settings import BatchSettings
from gateway.batches.store import BatchStore
from tests.browser.conftest import Visit
from tests.browser.site import XSS, Site
from tests.gateway.batches.made import order

pytestmark = pytest.mark.browser


def _works(site: Site, key: str) -> int:
    request = urllib.request.Request(f"{site.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_a_key_is_born_used_rotated_and_revoked(site: Site, visit: Visit) -> None:
    page = visit("developer")
    page.goto(site.account("/keys"))
    page.get_by_label("Name").fill("life of a key")
    page.get_by_label("ai:read").check()
    page.get_by_role("button", name="Issue").click()
    text = page.locator("#key-text").inner_text()
    page.reload()
    page.goto(site.account("/keys"))
    assert text not in page.content()
    assert _works(site, text) == 200
    row = page.locator("#keys tbody tr", has_text="life of a key").first
    assert "ai:run" not in row.inner_text()
    row.get_by_text("Rotate…").click()
    row.get_by_label("The old key ends").select_option("3600")
    row.get_by_role("button", name="Rotate").click()
    successor = page.locator("#key-text").inner_text()
    assert _works(site, successor) == _works(site, text) == 200
    page.goto(site.account("/keys"))
    row = page.locator("#keys tbody tr", has_text="life of a key").first
    row.get_by_text("Revoke…").click()
    row.get_by_role("button", name="Revoke for good").click()
    deadline = time.monotonic() + 5
    while _works(site, successor) == 200:
        assert time.monotonic() < deadline, "a revoked key goes on working"
        time.sleep(0.05)
    assert page.locator("#keys tbody tr", has_text="life of a key").first.get_by_text("revoked").is_visible()


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without"])
def test_a_batch_is_followed_and_ended(site: Site, visit: Visit, *, scripts: bool) -> None:
    store = BatchStore(site.database, BatchSettings(), clock=time.time_ns, told=lambda *_: None)
    batch = store.create(site.account_id, order(4))
    line = store.claim(batch.id, "another process")  # whose lease keeps it from running here
    assert line is not None
    assert store.end(line, LineState.SUCCEEDED, b"said", TokenUsage(7, 0, 8))
    page = visit("developer", java_script_enabled=scripts)
    page.goto(site.account())
    page.get_by_role("link", name="Batches").click()
    row = page.locator("#batches tbody tr", has_text=batch.id)
    assert "1 of 4" in row.inner_text()
    row.get_by_text("Cancel…").click()
    row.get_by_role("button", name="Run no more of it").click()
    row.get_by_text("cancelling").wait_for()
    assert row.get_by_text("Cancel…").count() == 0


def test_a_budget_is_set_seen_on_the_overview_and_removed(site: Site, visit: Visit) -> None:
    page = visit("billing")
    page.goto(site.account("/limits"))
    page.get_by_label("Limit in USD").fill("1000")
    page.get_by_role("button", name="Set").click()
    row = page.locator("#budget-table tbody tr", has_text="$1,000.00")
    assert "refuses" in row.inner_text()
    page.goto(site.account())
    assert (
        "of $1,000.00"
        in page.get_by_role("region", name="Budgets")
        .or_(page.locator("section", has_text="Budgets"))
        .first.inner_text()
    )
    page.goto(site.account("/limits"))
    row = page.locator("#budget-table tbody tr", has_text="$1,000.00")
    row.get_by_text("Remove…").click()
    row.get_by_role("button", name="Remove").click()
    assert page.locator("#budget-table").count() == 0


def test_an_account_is_divided_without_scripts(site: Site, visit: Visit) -> None:
    page = visit("owner", java_script_enabled=False)
    page.goto(site.account("/projects"))
    page.get_by_label("Name").fill("search")
    page.get_by_role("button", name="Open").click()
    assert "open" in page.locator("#projects tbody tr", has_text="search").inner_text()
    page.goto(site.account("/service-accounts"))
    page.get_by_label("Name").fill("nightly")
    page.get_by_role("button", name="Add").click()
    page.get_by_label("Role of nightly").select_option("viewer")
    page.get_by_role("button", name="Save").click()
    assert page.get_by_label("Role of nightly").input_value() == "viewer"
    page.goto(site.account("/keys"))
    page.get_by_label("Name").fill("of a program")
    page.get_by_label("In project").select_option(label="search")
    page.get_by_label("Owned by").select_option(label="nightly (viewer)")
    page.get_by_role("button", name="Issue").click()
    assert _works(site, page.locator("#key-text").inner_text()) == 200
    page.goto(site.account("/limits"))
    page.get_by_label("At most").fill("1,000")
    page.get_by_label("For", exact=True).select_option(label="project search")
    page.get_by_role("button", name="Set the limit").click()
    row = page.locator("#rule-table tbody tr", has_text="project search")
    row.get_by_text("Remove…").click()
    row.get_by_role("button", name="Remove").click()
    assert page.locator("#rule-table tbody tr", has_text="project search").count() == 0


def test_limits_shrink_with_use_and_not_with_looking(site: Site, visit: Visit) -> None:
    page = visit("viewer")

    def left() -> int:
        page.goto(site.account("/limits"))
        row = page.locator("#limits tbody tr", has_text="tokens per day")
        return int(row.locator("data").nth(1).get_attribute("value") or "")

    before = left()
    assert left() == before
    site.chat("One, two, three.")
    assert left() < before


def test_the_playground_streams_and_says_what_it_took(site: Site, visit: Visit) -> None:
    page = visit("developer")
    page.goto(site.account("/playground"))
    page.get_by_label("Your message").fill("What is the capital of France?")
    page.get_by_label("Output tokens at most").fill("16")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("Done.").wait_for()
    assert "Paris" in page.locator("#answer").inner_text()
    assert re.fullmatch(r"\d+ ms", page.locator("#told-first").inner_text())
    cost = page.locator("#told-cost").inner_text()
    output = page.locator("#told-out").inner_text()
    page.get_by_role("link", name="record").click()
    page.get_by_role("heading", name="Timeline").wait_for()
    request_id = page.url.rsplit("/", 1)[1]
    record = site.console(f"/requests/{request_id}")
    assert cost == f"${record['cost']}"
    assert output == str(record["completion_tokens"])
    assert "Playground" in page.locator("main").inner_text()


def test_a_stopped_answer_is_recorded_for_what_it_was(site: Site, visit: Visit) -> None:
    page = visit("developer")
    page.goto(site.account("/playground"))
    page.get_by_label("Your message").fill("Count from one to five hundred in words.")
    page.get_by_label("Output tokens at most").fill("1000")
    page.get_by_role("button", name="Send").click()
    page.locator("#answer", has_text=re.compile(r"\w")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("what was produced is charged").wait_for()
    deadline = time.monotonic() + 15
    while site.console("/requests?limit=1")["requests"][0]["outcome"] != "client_disconnected":
        assert time.monotonic() < deadline, site.console("/requests?limit=1")
        time.sleep(0.1)
    assert site.console("/requests?limit=1")["requests"][0]["completion_tokens"] < 1000


def test_a_refusal_is_said_in_the_playground(site: Site, visit: Visit) -> None:
    page = visit("developer")
    page.goto(site.account("/playground"))
    page.get_by_label("Your message").fill("word " * 3_900)
    page.get_by_role("button", name="Send").click()
    said = page.locator("#said")
    page.wait_for_timeout(200)
    said.filter(has_text=re.compile("tokens|context", re.IGNORECASE)).wait_for()


def test_what_a_role_may_not_do_is_not_offered_and_not_done(site: Site, visit: Visit) -> None:
    page = visit("viewer")
    page.goto(site.account("/keys"))
    assert page.get_by_role("button", name="Issue").count() == 0
    for tail in ("/credits", "/members", "/playground"):
        answer = page.goto(site.account(tail))
        assert answer is not None
        assert answer.status == 403
        assert page.get_by_role("alert").is_visible()
    answer = page.goto(f"{site.url}/dashboard/operator")
    assert answer is not None
    assert answer.status == 404
    stranger = visit("stranger")
    answer = stranger.goto(site.account())
    assert answer is not None
    assert answer.status == 404


def test_a_form_that_another_site_sends_changes_nothing(site: Site, visit: Visit) -> None:
    """The browser sends its cookie with the click from elsewhere only if the cookie lets it, and the origin anyway."""
    page = visit("owner")
    page.goto(site.account("/keys"))
    before = page.locator("#keys tbody tr").count()
    elsewhere = page.context.new_page()
    elsewhere.route("http://evil.test/**", lambda route: route.fulfill(content_type="text/html", body=_evil(site)))
    elsewhere.goto("http://evil.test/")
    elsewhere.get_by_role("button").click()
    elsewhere.wait_for_load_state()
    page.reload()
    assert page.locator("#keys tbody tr").count() == before


def _evil(site: Site) -> str:
    form = f'<form method="post" action="{site.account("/keys")}">'
    return form + '<input name="name" value="evil"><button>win</button></form>'


def test_no_given_name_ever_runs(site: Site, visit: Visit) -> None:
    page = visit("owner")
    page.goto(site.account("/keys"))
    page.get_by_label("Name").fill(XSS[:100])
    page.get_by_role("button", name="Issue").click()
    page.goto(site.account("/members"))
    page.get_by_label("Email address").evaluate(
        "(field, text) => { field.type = 'text'; field.value = text; }", f"{XSS[:40]}@x".replace(" ", "")
    )
    page.get_by_role("button", name="Make a link").click()
    for path in (
        site.account(tail) for tail in ("", "/keys", "/usage?by=key", "/requests", "/limits", "/members", "/audit")
    ):
        page.goto(path)
        _assert_unowned(page)
    operator = visit("operator")
    for tail in ("/tenants?everything=1", "/audit", "/users"):
        operator.goto(f"{site.url}/dashboard/operator{tail}")
        _assert_unowned(operator)


def _assert_unowned(page: Page) -> None:
    page.wait_for_load_state()
    assert page.title() != "owned"
    assert page.locator("img").count() == 0
    assert json.loads(page.evaluate("JSON.stringify([...document.scripts].map((one) => one.src || one.type))")) == [
        one for one in page.evaluate("[...document.scripts].map((one) => one.src || one.type)") if one
    ]
