"""Renders pages and fragments from templates, with what every page has; and turns errors into drawn pages.

Every answer forbids what the pages don't need: scripts from elsewhere and inline ones, frames, forms to elsewhere.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import quote, urlencode

import jinja2
import structlog
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.dashboard import figures
from api.dashboard.access import Need, Page, Visit, visit
from api.dashboard.assets import Assets
from api.departure import ClientGone
from api.errors import INTERNAL, PageUnknown, SignInNeeded, row_of
from api.page_templates import templates_of
from api.refusals import FORESEEN
from api.services import Services
from tenancy.roles import Right

log = structlog.get_logger(__name__)

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    # A page shows one visitor's data; after signing out the Back button must not.
    "cache-control": "no-store",
}
THEMES: Final = ("light", "dark")
THEME_COOKIE: Final = "pagegate_theme"


@dataclass(frozen=True, slots=True)
class NavEntry:
    name: str
    path: str
    title: str
    right: Right


ACCOUNT_PAGES: Final = (
    NavEntry("overview", "", "Overview", Right.SEE_USAGE),
    NavEntry("usage", "/usage", "Usage", Right.SEE_USAGE),
    NavEntry("requests", "/requests", "Requests", Right.SEE_USAGE),
    NavEntry("batches", "/batches", "Batches", Right.SEE_USAGE),
    NavEntry("playground", "/playground", "Playground", Right.GENERATE),
    NavEntry("models", "/models", "Models", Right.SEE_USAGE),
    NavEntry("keys", "/keys", "Keys", Right.SEE_USAGE),
    NavEntry("projects", "/projects", "Projects", Right.SEE_USAGE),
    NavEntry("service accounts", "/service-accounts", "Service accounts", Right.ADMINISTER),
    NavEntry("limits", "/limits", "Limits & budgets", Right.SEE_USAGE),
    NavEntry("credits", "/credits", "Credits & ledger", Right.SEE_MONEY),
    NavEntry("invoices", "/invoices", "Invoices", Right.SEE_MONEY),
    NavEntry("members", "/members", "Members", Right.ADMINISTER),
    NavEntry("audit", "/audit", "Audit log", Right.ADMINISTER),
)
OPERATOR_PAGES: Final = (
    ("live", "", "Live KV"),
    ("tenants", "/tenants", "Tenants"),
    ("backends", "/backends", "Backends"),
    ("prices", "/prices", "Price book"),
    ("users", "/users", "Users"),
    ("operator audit", "/audit", "Audit log"),
    ("invariants", "/invariants", "Invariants"),
)


class Pages:
    def __init__(self, services: Services, assets: Assets) -> None:
        self._services = services
        self.assets = assets
        self._environment = _environment(assets)

    def page(
        self,
        visited: Visit,
        template: str,
        *,
        here: str,
        title: str,
        status: int = 200,
        as_of_ns: int | None = None,
        **values: Any,
    ) -> Response:
        """A whole page. here: the entry of the menu. as_of_ns: what it shows was true then; now, if not given."""
        html = self._environment.get_template(template).render(
            visit=visited,
            here=here,
            title=title,
            as_of_ns=time.time_ns() if as_of_ns is None else as_of_ns,
            account_pages=_pages_for(visited),
            theme=_theme(visited.request),
            form_field=Markup('<input type="hidden" name="form_token" value="{}">').format(visited.form_token),
            **values,
        )
        return Response(html, status, media_type="text/html", headers=HEADERS)

    def fragment(self, template: str, **values: Any) -> str:
        return self._environment.get_template(template).render(**values)

    def guard(self, need: Need | Right, page: Page, path: str) -> "Guarded":
        return Guarded(self, self._services, need, page, path)

    def error(self, visited: Visit, error: Exception) -> Response:
        if isinstance(error, SignInNeeded):
            return _to_sign_in(visited.request)
        row = row_of(error) if isinstance(error, FORESEEN) else INTERNAL
        text = row.says if row.says is not None else str(error)
        if row.status >= 500:
            text = f"{text} Request id: {visited.request.state.request_id}."
        response = self.page(
            visited, "error.html.j2", here="", title=_TITLES.get(row.status, "Something is in the way"),
            status=row.status, text=text,
        )  # fmt: skip
        wait_s = getattr(error, "retry_after_s", None) or row.retry_after_s
        if wait_s:
            response.headers["retry-after"] = str(wait_s)
        return response


_TITLES: Final = {
    401: "Not signed in",
    403: "Not allowed",
    404: "Not found",
    429: "Too much at once",
    503: "Not available at this moment",
}


@dataclass(frozen=True, slots=True)
class _NamedRoute:
    path: str


class Guarded:
    """A route's endpoint: lets in who may, and draws what goes wrong."""

    def __init__(self, pages: Pages, services: Services, need: Need | Right, page: Page, path: str) -> None:
        self._pages = pages
        self._services = services
        self.need = need
        self._page = page
        self._route = _NamedRoute(path)

    async def serve(self, request: Request) -> Response:
        request.scope["route"] = self._route  # for the access log and the counts
        visited = Visit(request, self._services)
        try:
            visited = await visit(request, self._services, self.need)
            return await self._page(visited)
        except ClientGone:
            return Response(status_code=499)
        except FORESEEN as error:
            return self._drawn(visited, error)
        except Exception as error:
            log.exception("unforeseen error", request_id=request.state.request_id)
            return self._drawn(visited, error)

    def _drawn(self, visited: Visit, error: Exception) -> Response:
        if visited.request.headers.get("hx-request") == "true" and isinstance(error, SignInNeeded):
            return Response(status_code=401, headers={"hx-redirect": "/dashboard/sign-in"})
        return self._pages.error(visited, error)


@cache
def _environment(assets: Assets) -> jinja2.Environment:
    """With the templates that have been compiled: once a process, however many applications it makes."""
    environment = templates_of("api.dashboard")
    environment.filters.update(figures.FILTERS)
    environment.globals.update(
        asset=assets.url,
        has_asset=assets.has,
        scripts_missing=assets.missing,
        Right=Right,
        operator_pages=OPERATOR_PAGES,
        query=_query,
    )
    return environment


def _to_sign_in(request: Request) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    onward = "" if request.method != "GET" or path == "/dashboard" else f"?next={quote(path)}"
    return RedirectResponse(f"/dashboard/sign-in{onward}", 303, headers=HEADERS)


def _pages_for(visited: Visit) -> list[NavEntry]:
    return [entry for entry in ACCOUNT_PAGES if entry.right in visited.rights]


def _theme(request: Request) -> str:
    chosen = request.cookies.get(THEME_COOKIE, "")
    return chosen if chosen in THEMES else ""


def _query(parameters: Mapping[str, str], **changes: str | None) -> str:
    """The page's own query with some values changed, or with None left out."""
    merged = {**parameters, **changes}
    return urlencode({name: value for name, value in merged.items() if value})


async def unknown_page(_visited: Visit) -> Response:
    raise PageUnknown
