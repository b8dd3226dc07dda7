"""A user's own page: memberships, password; and the choice of theme, which needs no user."""

from starlette.responses import RedirectResponse, Response

from api.dashboard.access import Visit, is_secure, own_path, signed_in
from api.dashboard.pages import THEME_COOKIE, THEMES, Pages
from tenancy.errors import SignInRefused, SignInThrottled
from tenancy.sign_in import password_fault

_YEAR_S = 365 * 86_400


class ProfilePages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return self._page(visit)

    async def change_password(self, visit: Visit) -> Response:
        """Every other session of the user ends; this one goes on as a new one."""
        old, new = visit.form.get("old", ""), visit.form.get("new", "")
        fault = password_fault(new)
        if fault is not None:
            return self._page(visit, fault=fault, status=400)
        sign_ins = visit.services.sign_ins
        try:
            await sign_ins.change_password(visit.user, old, new)
        except (SignInRefused, SignInThrottled) as error:
            return self._page(visit, fault=str(error), status=400 if isinstance(error, SignInRefused) else 429)
        opened = await sign_ins.for_new_user(visit.user)
        return signed_in(visit.request, visit.services, opened.token, "/dashboard/profile?changed=1")

    async def theme(self, visit: Visit) -> Response:
        response = RedirectResponse(own_path(visit.form.get("next", "")), 303)
        theme = visit.form.get("theme", "")
        if theme in THEMES:
            secure = is_secure(visit.request, visit.services)
            response.set_cookie(THEME_COOKIE, theme, max_age=_YEAR_S, path="/dashboard", secure=secure, samesite="lax")
        return response

    def _page(self, visit: Visit, *, fault: str = "", status: int = 200) -> Response:
        changed = visit.request.query_params.get("changed") == "1"
        return self._pages.page(
            visit, "profile.html.j2", here="profile", title="You", status=status, fault=fault, changed=changed
        )
