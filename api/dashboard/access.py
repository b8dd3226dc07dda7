"""Who visits a page, and whether they may: sessions from cookies, rights from roles, forms from our own pages.

Every route of the dashboard goes through `guarded`, which knows what each needs. An account that a visitor has no right
in is as unknown as one that does not exist. Whatever changes something needs a form that the visitor's own session made
and that comes from this origin.
"""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api.body import read_body
from api.client_address import comes_through_trusted_proxy
from api.errors import FormForeign, FormTooLarge, PageUnknown, SignInNeeded
from api.services import Services
from tenancy import people
from tenancy.accounts import Account, is_account_id
from tenancy.audit_log import Actor, ActorKind
from tenancy.database import act_for_alone
from tenancy.errors import AccountNotFound, RightMissing
from tenancy.people_store import UserSession
from tenancy.provisioning import get_account
from tenancy.roles import NO_RIGHTS, Right, rights_of
from tenancy.rule_setters import RuleSetter
from tenancy.sign_in import SESSION_NS_MAX, form_token
from tenancy.users import Membership, User

FORM_FIELD: Final = "form_token"
FORM_HEADER: Final = "x-form-token"
_FORM_BYTES_MAX: Final = 64 << 10
_FORM_FIELDS_MAX: Final = 100
_SAFE: Final = frozenset({"GET", "HEAD"})
_COOKIE: Final = "pagegate_session"


class Need(Enum):
    """What a page needs of its visitor, where it is no right in an account."""

    NOTHING = "nothing"
    SIGNED_IN = "signed in"
    OPERATOR = "operator"


@dataclass(slots=True)
class Visit:
    """One request of a visitor. session: None if nobody is signed in. account, rights: of the account in the path."""

    request: Request
    services: Services
    session: UserSession | None = None
    token: str = ""
    account: Account | None = None
    rights: frozenset[Right] = NO_RIGHTS
    memberships: list[Membership] = field(default_factory=list)
    form: Mapping[str, str] = field(default_factory=dict)
    form_lists: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def user(self) -> User:
        assert self.session is not None, "the route needs somebody who is signed in"
        return self.session.user

    @property
    def account_id(self) -> str:
        assert self.account is not None, "the route has an account in its path"
        return self.account.id

    @property
    def actor(self) -> Actor:
        return Actor(ActorKind.USER, self.user.id)

    @property
    def rule_setter(self) -> RuleSetter:
        """In whose name limits and budgets are set on pages."""
        return RuleSetter.OPERATOR if self.user.operator else RuleSetter.ACCOUNT

    @property
    def form_token(self) -> str:
        return form_token(self.token) if self.token else ""

    def may(self, right: Right) -> bool:
        return right in self.rights


Page = Callable[[Visit], Awaitable[Response]]


async def visit(request: Request, services: Services, need: Need | Right) -> Visit:
    """The visitor, who may see the page. Raises SignInNeeded, PageUnknown, RightMissing, FormForeign, FormTooLarge."""
    found = Visit(request, services)
    if request.method not in _SAFE:
        _require_own_origin(request)
        await _read_form(found)
    token = request.cookies.get(cookie_name(request, services), "")
    if token:
        found.session = await services.sign_ins.find(token)
        found.token = token if found.session is not None else ""
    if need is Need.NOTHING:
        return found
    if found.session is None:
        raise SignInNeeded
    if request.method not in _SAFE:
        _require_own_form(found)
    await _look_up_rights(found)
    if need is Need.OPERATOR and not found.user.operator:
        raise PageUnknown
    if isinstance(need, Right) and need not in found.rights:
        raise RightMissing("Your role in this account does not allow this.")
    return found


async def _look_up_rights(found: Visit) -> None:
    database, user = found.services.database, found.user
    found.memberships = await database.call(people.list_memberships, database, user.id)
    account_id = found.request.path_params.get("account_id")
    if account_id is None:
        return
    role = next((one.role for one in found.memberships if one.account_id == account_id), None)
    found.rights = rights_of(role, operator=user.operator)
    if not found.rights or not is_account_id(account_id):
        raise PageUnknown
    try:
        found.account = await database.call(get_account, database, account_id)
        act_for_alone(account_id)
    except AccountNotFound:
        raise PageUnknown from None


async def _read_form(found: Visit) -> None:
    body = await read_body(found.request)
    if len(body) > _FORM_BYTES_MAX:
        raise FormTooLarge
    kind = found.request.headers.get("content-type", "")
    if not kind.startswith("application/x-www-form-urlencoded"):
        found.request.state.body = body  # the playground sends JSON, with the token in a header
        return
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, max_num_fields=_FORM_FIELDS_MAX, strict_parsing=bool(body)
        )
    except ValueError:
        raise FormForeign from None
    lists: dict[str, list[str]] = {}
    for name, value in pairs:
        lists.setdefault(name, []).append(value)
    found.form_lists = lists
    found.form = {name: values[-1] for name, values in lists.items()}


def _require_own_origin(request: Request) -> None:
    """Browsers say where a form comes from; one that comes from elsewhere, or does not say, changes nothing."""
    origin = request.headers.get("origin", "")
    if urlsplit(origin).netloc != request.headers.get("host", "") or not origin:
        raise FormForeign


def _require_own_form(found: Visit) -> None:
    given = found.form.get(FORM_FIELD) or found.request.headers.get(FORM_HEADER, "")
    if not hmac.compare_digest(given.encode(), found.form_token.encode()):
        raise FormForeign


def is_secure(request: Request, services: Services) -> bool:
    """Whether the visitor's own connection is TLS, as far as we or a trusted proxy can tell."""
    if request.url.scheme == "https":
        return True
    trusted = comes_through_trusted_proxy(request.scope, services.settings.trusted_proxies)
    return trusted and request.headers.get("x-forwarded-proto", "").split(",")[-1].strip() == "https"


def cookie_name(request: Request, services: Services) -> str:
    """With TLS the name itself keeps other hosts and paths from setting it."""
    return f"__Host-{_COOKIE}" if is_secure(request, services) else _COOKIE


def signed_in(request: Request, services: Services, token: str, to: str) -> Response:
    """On to a page, with a session. Lax: a link from elsewhere finds its reader signed in, a form from there not."""
    response = RedirectResponse(to, 303)
    response.set_cookie(
        cookie_name(request, services),
        token,
        max_age=SESSION_NS_MAX // 1_000_000_000,
        path="/",
        secure=is_secure(request, services),
        httponly=True,
        samesite="lax",
    )
    return response


def signed_out(request: Request, services: Services, to: str) -> Response:
    response = RedirectResponse(to, 303)
    response.delete_cookie(
        cookie_name(request, services), path="/", secure=is_secure(request, services), httponly=True, samesite="lax"
    )
    return response


def own_path(text: str, otherwise: str = "/dashboard") -> str:
    """A path of the dashboard to go on to; anything else would let a link lead a visitor away."""
    parts = urlsplit(text)
    safe = not parts.scheme and not parts.netloc and parts.path.startswith("/dashboard") and "\\" not in text
    return text if safe and text.isprintable() and not text.startswith("//") else otherwise
