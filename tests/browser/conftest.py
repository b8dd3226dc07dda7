"""A real Chromium before a real service: one of each for all tests here; each test has pages of its own.

They end with this package: while Playwright's loop runs, the asynchronous tests of other packages could not.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from tests.browser.site import Site, open_site
from tests.engines import real_model_path

_SCREENSHOTS = Path(__file__).parent / "screenshots"
_WAIT_MS = 15_000

Visit = Callable[..., Page]


@pytest.fixture(scope="package")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("browser") / "home"
    with open_site(home, real_model_path(), PAGEGATE_ENGINE__KV_CACHE_BYTES=str(24 << 20)) as opened:
        yield opened


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "there is no chromium here: `make browser` installs it (Debian: apt-get install chromium)"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="package")
def sessions() -> dict[str, Any]:
    """Cookies by user: signing in is tested once, not before every page."""
    return {}


@pytest.fixture
def visit(site: Site, browser: Browser, sessions: dict[str, Any]) -> Iterator[Visit]:
    """A page of somebody who is signed in, or of nobody (None). What the browser complains of fails the test."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def listen(message: ConsoleMessage) -> None:
        # A refusal that the test asked for is also a line in the console.
        if message.type in {"error", "warning"} and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def open_page(who: str | None, **options: Any) -> Page:
        if who is not None and who not in sessions:
            sessions[who] = _signed_in(site, browser, who)
        defaults: dict[str, Any] = {"viewport": {"width": 1360, "height": 900}, "locale": "en-US"}
        state = None if who is None else sessions[who]
        context = browser.new_context(**(defaults | {"storage_state": state} | options))
        context.set_default_timeout(_WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("console", listen)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def picture() -> Callable[[Page, str], None]:
    """Keeps a screenshot, in a folder that git ignores."""

    def take(page: Page, name: str) -> None:
        _SCREENSHOTS.mkdir(exist_ok=True)
        page.screenshot(path=_SCREENSHOTS / f"{name}.png", full_page=True)

    return take


def _signed_in(site: Site, browser: Browser, who: str) -> Any:
    context = browser.new_context()
    page = context.new_page()
    page.goto(site.link(who))
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Sign out").wait_for()
    state = context.storage_state()
    context.close()
    return state
