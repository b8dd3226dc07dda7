"""The dashboard's routes, each with what it needs of its visitor. api/app.py puts them beside the APIs'."""

from collections.abc import Callable
from typing import Final

from starlette.routing import Route

from api.dashboard.access import Need, Page
from api.dashboard.account_log import AccountLogPages
from api.dashboard.assets import read_assets
from api.dashboard.batches import BatchPages
from api.dashboard.explorer import ExplorerPages
from api.dashboard.keys import KeyPages
from api.dashboard.limits import LimitPages
from api.dashboard.live import LiveFigures
from api.dashboard.members import MemberPages
from api.dashboard.models import ModelPages
from api.dashboard.money import MoneyPages
from api.dashboard.operator import OperatorPages
from api.dashboard.overview import OverviewPages
from api.dashboard.pages import Pages, unknown_page
from api.dashboard.playground import PlaygroundPages
from api.dashboard.profile import ProfilePages
from api.dashboard.projects import ProjectPages
from api.dashboard.requests import RequestPages
from api.dashboard.service_accounts import ServiceAccountPages
from api.dashboard.sign_in import SignInPages
from api.services import Services
from tenancy.roles import Right

_ROOT: Final = "/dashboard"
_ACCOUNT: Final = "/a/{account_id}"


def dashboard_routes(services: Services) -> list[Route]:
    assets = read_assets()
    pages = Pages(services, assets)
    routes: list[Route] = []

    def add(path: str, need: Need | Right, page: Page, *, method: str = "GET") -> None:
        routes.append(Route(_ROOT + path, pages.guard(need, page, _ROOT + path).serve, methods=[method]))

    _add_signing_in(add, pages)
    _add_tenant(add, pages)
    _add_operator(add, pages, services)
    routes.append(Route(f"{_ROOT}/static/{{name:path}}", assets.serve, methods=["GET"]))
    add("/{rest:path}", Need.SIGNED_IN, unknown_page)
    return routes


Add = Callable[..., None]


def _add_signing_in(add: Add, pages: Pages) -> None:
    sign_in, profile = SignInPages(pages), ProfilePages(pages)
    add("", Need.SIGNED_IN, sign_in.home)
    add("/", Need.SIGNED_IN, sign_in.home)
    add("/sign-in", Need.NOTHING, sign_in.form)
    add("/sign-in", Need.NOTHING, sign_in.sign_in, method="POST")
    add("/sign-out", Need.SIGNED_IN, sign_in.sign_out, method="POST")
    add("/link/{token}", Need.NOTHING, sign_in.link)
    add("/link/{token}", Need.NOTHING, sign_in.follow, method="POST")
    add("/theme", Need.NOTHING, profile.theme, method="POST")
    add("/profile", Need.SIGNED_IN, profile.page)
    add("/profile/password", Need.SIGNED_IN, profile.change_password, method="POST")


def _add_tenant(add: Add, pages: Pages) -> None:
    sees = Right.SEE_USAGE
    add(_ACCOUNT, sees, OverviewPages(pages).page)
    explorer = ExplorerPages(pages)
    add(f"{_ACCOUNT}/usage", sees, explorer.page)
    add(f"{_ACCOUNT}/usage.csv", sees, explorer.csv)
    requests = RequestPages(pages)
    add(f"{_ACCOUNT}/requests", sees, requests.log)
    add(f"{_ACCOUNT}/requests/{{request_id}}", sees, requests.one)
    add(f"{_ACCOUNT}/models", sees, ModelPages(pages).page)
    batches = BatchPages(pages)
    add(f"{_ACCOUNT}/batches", sees, batches.page)
    # Who may have what an account's keys do, and operators: the right to generate, which these lack, would not do.
    add(f"{_ACCOUNT}/batches/{{batch_id}}/cancel", Right.MANAGE_KEYS, batches.cancel, method="POST")
    keys = KeyPages(pages)
    add(f"{_ACCOUNT}/keys", sees, keys.page)
    add(f"{_ACCOUNT}/keys", Right.MANAGE_KEYS, keys.issue, method="POST")
    add(f"{_ACCOUNT}/keys/{{key_id}}/{{deed}}", Right.MANAGE_KEYS, keys.change, method="POST")
    projects = ProjectPages(pages)
    add(f"{_ACCOUNT}/projects", sees, projects.page)
    add(f"{_ACCOUNT}/projects", Right.ADMINISTER, projects.open, method="POST")
    add(f"{_ACCOUNT}/projects/{{project_id}}/{{deed}}", Right.ADMINISTER, projects.change, method="POST")
    programs = ServiceAccountPages(pages)
    add(f"{_ACCOUNT}/service-accounts", Right.ADMINISTER, programs.page)
    add(f"{_ACCOUNT}/service-accounts", Right.ADMINISTER, programs.add, method="POST")
    one = f"{_ACCOUNT}/service-accounts/{{service_account_id}}/{{deed}}"
    add(one, Right.ADMINISTER, programs.change, method="POST")
    limits = LimitPages(pages)
    add(f"{_ACCOUNT}/limits", sees, limits.page)
    add(f"{_ACCOUNT}/limits", Right.ADMINISTER, limits.set_rule, method="POST")
    add(f"{_ACCOUNT}/limits/remove", Right.ADMINISTER, limits.remove_rule, method="POST")
    add(f"{_ACCOUNT}/budgets", Right.SET_BUDGETS, limits.add_budget, method="POST")
    add(f"{_ACCOUNT}/budgets/{{budget_id}}/remove", Right.SET_BUDGETS, limits.remove_budget, method="POST")
    money = MoneyPages(pages)
    add(f"{_ACCOUNT}/credits", Right.SEE_MONEY, money.credits)
    add(f"{_ACCOUNT}/credits", Need.OPERATOR, money.book, method="POST")
    add(f"{_ACCOUNT}/invoices", Right.SEE_MONEY, money.invoices)
    add(f"{_ACCOUNT}/invoices/{{number}}", Right.SEE_MONEY, money.invoice)
    playground = PlaygroundPages(pages)
    add(f"{_ACCOUNT}/playground", Right.GENERATE, playground.page)
    add(f"{_ACCOUNT}/playground/chat", Right.GENERATE, playground.chat, method="POST")
    members = MemberPages(pages)
    add(f"{_ACCOUNT}/members", Right.ADMINISTER, members.page)
    add(f"{_ACCOUNT}/members/invite", Right.ADMINISTER, members.invite, method="POST")
    add(f"{_ACCOUNT}/members/withdraw", Right.ADMINISTER, members.withdraw, method="POST")
    add(f"{_ACCOUNT}/members/{{user_id}}", Right.ADMINISTER, members.change, method="POST")
    add(f"{_ACCOUNT}/audit", Right.ADMINISTER, AccountLogPages(pages).page)


def _add_operator(add: Add, pages: Pages, services: Services) -> None:
    operator = OperatorPages(pages, LiveFigures(services))
    add("/operator", Need.OPERATOR, operator.live)
    add("/operator/events", Need.OPERATOR, operator.events)
    add("/operator/tenants", Need.OPERATOR, operator.tenants)
    add("/operator/backends", Need.OPERATOR, operator.backends)
    add("/operator/prices", Need.OPERATOR, operator.prices)
    add("/operator/users", Need.OPERATOR, operator.users)
    add("/operator/audit", Need.OPERATOR, operator.audit)
    add("/operator/invariants", Need.OPERATOR, operator.invariants)
