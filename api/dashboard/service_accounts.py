"""GET …/service-accounts and its forms: programs that own keys, and the role that bounds all of them."""

from collections import Counter
from collections.abc import Callable
from functools import partial

from starlette.responses import RedirectResponse, Response

from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from api.errors import FormInvalid, PageUnknown
from tenancy import provisioning, service_accounts
from tenancy.errors import NameTaken
from tenancy.provisioning import ProvisioningInvalid
from tenancy.roles import SCOPES, Role


class ServiceAccountPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return await self._page(visit)

    async def add(self, visit: Visit) -> Response:
        try:
            role = _role(visit.form.get("role", ""))
        except FormInvalid as error:
            return await self._page(visit, fault=str(error), status=400)
        deed = partial(service_accounts.add_service_account, role=role, by=visit.actor)
        return await self._done(visit, deed, visit.account_id, visit.form.get("name", ""))

    async def change(self, visit: Visit) -> Response:
        """deed: role, disable or enable."""
        deed, by = visit.request.path_params["deed"], visit.actor
        if deed == "role":
            try:
                role = _role(visit.form.get("role", ""))
            except FormInvalid as error:
                return await self._page(visit, fault=str(error), status=400)
            change = partial(service_accounts.change_service_account, role=role, by=by)
        elif deed in {"disable", "enable"}:
            change = partial(service_accounts.change_service_account, disabled=deed == "disable", by=by)
        else:
            raise PageUnknown
        return await self._done(visit, change, visit.account_id, visit.request.path_params["service_account_id"])

    async def _done(self, visit: Visit, deed: Callable[..., object], *arguments: str) -> Response:
        database = visit.services.database
        try:
            await database.call(deed, database, *arguments)
        except (NameTaken, ProvisioningInvalid) as error:
            return await self._page(visit, fault=str(error), status=400)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/service-accounts", 303)

    async def _page(self, visit: Visit, *, fault: str = "", status: int = 200) -> Response:
        database = visit.services.database
        keys = await database.call(provisioning.list_keys, database, visit.account_id)
        return self._pages.page(
            visit,
            "service_accounts.html.j2",
            here="service accounts",
            title="Service accounts",
            status=status,
            programs=await database.call(service_accounts.list_service_accounts, database, visit.account_id),
            keys=Counter(key.service_account_id for key in keys if key.revoked_at_ns is None),
            roles={role: sorted(scope.value for scope in SCOPES[role]) for role in SCOPES},
            fault=fault,
            form=visit.form if fault else {},
        )


def _role(text: str) -> Role:
    try:
        role = Role(text)
    except ValueError:
        raise FormInvalid("Choose a role.") from None
    if role not in SCOPES:
        raise FormInvalid("A service account is nobody's owner: choose another role.")
    return role
