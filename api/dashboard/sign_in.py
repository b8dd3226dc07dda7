"""Signing in and out, and one-time links: of `pagegate dashboard`, and invitations to an account."""

import time
from functools import partial

from starlette.responses import RedirectResponse, Response

from api.client_address import client_address
from api.dashboard.access import Visit, own_path, signed_in, signed_out
from api.dashboard.pages import Pages
from api.errors import FormInvalid
from tenancy import people
from tenancy.errors import LinkInvalid, NameTaken, SignInRefused, SignInThrottled
from tenancy.people_store import OneTimeLink
from tenancy.provisioning import ProvisioningInvalid, get_account
from tenancy.sign_in import find_link, password_fault


class SignInPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def home(self, visit: Visit) -> Response:
        """On to what the visitor most likely wants."""
        if visit.memberships:
            return RedirectResponse(f"/dashboard/a/{visit.memberships[0].account_id}", 303)
        return RedirectResponse("/dashboard/operator" if visit.user.operator else "/dashboard/profile", 303)

    async def form(self, visit: Visit) -> Response:
        onward = own_path(visit.request.query_params.get("next", ""))
        if visit.session is not None:
            return RedirectResponse(onward, 303)
        return self._form(visit, onward)

    async def sign_in(self, visit: Visit) -> Response:
        onward = own_path(visit.form.get("next", ""))
        services = visit.services
        address = client_address(visit.request.scope, services.settings.trusted_proxies)
        email, password = visit.form.get("email", ""), visit.form.get("password", "")
        try:
            opened = await services.sign_ins.with_password(email, password, address)
        except (SignInRefused, SignInThrottled) as error:
            throttled = isinstance(error, SignInThrottled)
            response = self._form(visit, onward, fault=str(error), email=email, status=429 if throttled else 401)
            if throttled:
                response.headers["retry-after"] = str(error.retry_after_s or 5)
            return response
        if visit.token:
            await services.sign_ins.close(visit.token)
        return signed_in(visit.request, services, opened.token, onward)

    async def sign_out(self, visit: Visit) -> Response:
        await visit.services.sign_ins.close(visit.token)
        return signed_out(visit.request, visit.services, "/dashboard/sign-in")

    async def link(self, visit: Visit) -> Response:
        """Says what the link does. Looking at it does nothing: mail scanners and previews follow links too."""
        return await self._link_page(visit)

    async def follow(self, visit: Visit) -> Response:
        services, token = visit.services, visit.request.path_params["token"]
        link = await self._find(visit)
        if link.user_id is not None:
            if visit.token:
                await services.sign_ins.close(visit.token)
            opened = await services.sign_ins.with_link(token)
            return signed_in(visit.request, services, opened.token, "/dashboard")
        try:
            return await self._accept(visit, link, token)
        except (FormInvalid, NameTaken, ProvisioningInvalid) as error:
            return await self._link_page(visit, fault=str(error), status=400)

    async def _accept(self, visit: Visit, link: OneTimeLink, token: str) -> Response:
        services, database = visit.services, visit.services.database
        onward = f"/dashboard/a/{link.account_id}"
        if visit.session is not None:
            deed = partial(people.accept_invitation, user_id=visit.user.id, clock=time.time_ns)
            await database.call(deed, database, token)
            return RedirectResponse(onward, 303)
        name, password = visit.form.get("name", ""), visit.form.get("password", "")
        fault = password_fault(password)
        if fault is not None:
            raise FormInvalid(fault)
        password_hash = await services.sign_ins.hash_password(password)
        deed = partial(people.accept_invitation, name=name, password_hash=password_hash, clock=time.time_ns)
        user = await database.call(deed, database, token)
        opened = await services.sign_ins.for_new_user(user)
        return signed_in(visit.request, services, opened.token, onward)

    async def _link_page(self, visit: Visit, *, fault: str = "", status: int = 200) -> Response:
        try:
            link = await self._find(visit)
        except LinkInvalid:
            return self._pages.page(visit, "link_invalid.html.j2", here="", title="This link is spent", status=404)
        account = None
        if link.account_id is not None:
            database = visit.services.database
            account = await database.call(get_account, database, link.account_id)
        return self._pages.page(
            visit,
            "link.html.j2",
            here="",
            title="Sign in" if account is None else f"Join {account.name}",
            status=status,
            link=link,
            account_name="" if account is None else account.name,
            fault=fault,
            name=visit.form.get("name", ""),
        )

    async def _find(self, visit: Visit) -> OneTimeLink:
        database = visit.services.database
        find = partial(find_link, clock=time.time_ns)
        return await database.call(find, database, visit.request.path_params["token"])

    def _form(self, visit: Visit, onward: str, *, fault: str = "", email: str = "", status: int = 200) -> Response:
        return self._pages.page(
            visit, "sign_in.html.j2", here="", title="Sign in", status=status, onward=onward, fault=fault, email=email
        )
