"""GET …/keys and its forms: issue (the text is shown once), rotate, disable, enable, revoke.

Whoever manages keys issues those that infer; keys that administer are for who administers the account.
"""

import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_network
from typing import Final, TypeVar

from starlette.responses import RedirectResponse, Response

from api.console.schemas import instant_ns
from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from api.errors import FormInvalid, PageUnknown
from tenancy import provisioning
from tenancy.errors import RightMissing
from tenancy.keys import ALLOWED_SCOPES, ApiKey, KeyKind
from tenancy.pepper import open_pepper_of
from tenancy.principal import OPERATOR_SCOPES, Scope
from tenancy.projects import list_projects
from tenancy.provisioning import GRACE_S_MAX, IssuedKey, ProvisioningInvalid
from tenancy.roles import Right
from tenancy.service_accounts import list_service_accounts

T = TypeVar("T")

_GRACES: Final = {"0": "at once", "3600": "in an hour", "86400": "in a day", "604800": "in a week"}


class KeyPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return await self._page(visit)

    async def issue(self, visit: Visit) -> Response:
        try:
            return await self._issue(visit)
        except (FormInvalid, ProvisioningInvalid) as error:
            return await self._page(visit, fault=str(error), status=400)

    async def change(self, visit: Visit) -> Response:
        """deed: rotate, disable, enable or revoke."""
        key = await self._call(visit, provisioning.get_key, visit.account_id, visit.request.path_params["key_id"])
        _require_right_for(visit, key.kind)
        deed = visit.request.path_params["deed"]
        if deed == "rotate":
            return await self._rotate(visit, key)
        if deed == "revoke":
            change: Callable[..., ApiKey] = partial(provisioning.revoke_key, by=visit.actor, clock=time.time_ns)
        elif deed in {"disable", "enable"}:
            change = partial(provisioning.set_key_disabled, disabled=deed == "disable", by=visit.actor)
        else:
            raise PageUnknown
        await self._call(visit, change, visit.account_id, key.id)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/keys", 303)

    async def _issue(self, visit: Visit) -> Response:
        form = visit.form
        kind = KeyKind.ADMIN if form.get("kind") == KeyKind.ADMIN.value else KeyKind.INFERENCE
        _require_right_for(visit, kind)
        issued = await self._deed(
            visit,
            provisioning.issue_key,
            visit.account_id,
            name=form.get("name", ""),
            kind=kind,
            scopes=_scopes(visit, kind),
            expires_at_ns=_expiry(form.get("expires", "")),
            models=visit.form_lists.get("models"),
            networks=_networks(form.get("networks", "")),
            project_id=form.get("project") or None,
            service_account_id=form.get("owner") or None,
        )
        return await self._page(visit, issued=issued)

    async def _rotate(self, visit: Visit, key: ApiKey) -> Response:
        grace = visit.form.get("grace", "")
        if not grace.isascii() or not grace.isdigit() or int(grace[:9]) > GRACE_S_MAX:
            return await self._page(visit, fault="Choose when the old key ends.", status=400)
        try:
            issued = await self._deed(visit, provisioning.rotate_key, visit.account_id, key.id, grace_s=int(grace))
        except ProvisioningInvalid as error:
            return await self._page(visit, fault=str(error), status=400)
        return await self._page(visit, issued=issued)

    async def _page(
        self, visit: Visit, *, issued: IssuedKey | None = None, fault: str = "", status: int = 200
    ) -> Response:
        keys = await self._call(visit, provisioning.list_keys, visit.account_id)
        projects = await self._call(visit, list_projects, visit.account_id)
        programs = await self._call(visit, list_service_accounts, visit.account_id)
        now_ns = time.time_ns()
        return self._pages.page(
            visit,
            "keys.html.j2",
            here="keys",
            title="Keys",
            as_of_ns=now_ns,
            status=status,
            keys=[(key, key_state(key, now_ns)) for key in reversed(keys)],
            issued=issued,
            fault=fault,
            models=[card.id for card in visit.services.catalogue.all()],
            kinds=_kinds(visit),
            scopes={kind: sorted(ALLOWED_SCOPES[kind] - OPERATOR_SCOPES) for kind in _kinds(visit)},
            graces=_GRACES,
            projects=[one for one in projects if one.archived_at_ns is None],
            project_names={one.id: one.name for one in projects},
            programs=[one for one in programs if not one.disabled],
            program_names={one.id: one.name for one in programs},
            form=visit.form if fault else {},
        )

    @staticmethod
    async def _call(visit: Visit, deed: Callable[..., T], *arguments: object) -> T:
        return await visit.services.database.call(deed, visit.services.database, *arguments)

    @staticmethod
    async def _deed(visit: Visit, deed: Callable[..., IssuedKey], *arguments: object, **options: object) -> IssuedKey:
        services = visit.services

        def run() -> IssuedKey:
            pepper = open_pepper_of(services.database, services.settings.pepper_path)
            return deed(services.database, pepper, *arguments, by=visit.actor, clock=time.time_ns, **options)

        return await services.database.call(run)


def key_state(key: ApiKey, now_ns: int) -> str:
    if key.revoked_at_ns is not None:
        return "revoked"
    if key.expires_at_ns is not None and key.expires_at_ns <= now_ns:
        return "expired"
    return "disabled" if key.disabled else "enabled"


def _kinds(visit: Visit) -> list[KeyKind]:
    return [KeyKind.INFERENCE, *([KeyKind.ADMIN] if visit.may(Right.ADMINISTER) else [])]


def _require_right_for(visit: Visit, kind: KeyKind) -> None:
    if kind is KeyKind.ADMIN and not visit.may(Right.ADMINISTER):
        raise RightMissing("Your role in this account does not allow this: a key that administers is for who does.")


def _scopes(visit: Visit, kind: KeyKind) -> frozenset[Scope] | None:
    """Those that were ticked, None for none: then all usual ones. An operator's are for operators."""
    allowed = ALLOWED_SCOPES[kind] if visit.user.operator else ALLOWED_SCOPES[kind] - OPERATOR_SCOPES
    chosen = {scope for scope in allowed if scope.value in visit.form_lists.get("scopes", [])}
    return frozenset(chosen) or None


def _expiry(text: str) -> int | None:
    if not text:
        return None
    try:
        return instant_ns(text)
    except ValueError as error:
        raise FormInvalid("The expiry is no date.") from error


def _networks(text: str) -> list[str] | None:
    words = text.replace(",", " ").split()
    if not words:
        return None
    try:
        return [str(ip_network(word)) for word in words]
    except ValueError as error:
        raise FormInvalid("Write networks as 192.0.2.0/24 or 2001:db8::/32.") from error
