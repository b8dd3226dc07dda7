"""GET …/members and its forms: who may sign in to the account, and as what; invitations."""

import time
from functools import partial

from starlette.responses import RedirectResponse, Response

from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from api.errors import FormInvalid
from tenancy import people
from tenancy.errors import MembershipConflict, RightMissing
from tenancy.people import INVITATION_NS
from tenancy.provisioning import ProvisioningInvalid
from tenancy.roles import RIGHTS, Right, Role


class MemberPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return await self._page(visit)

    async def invite(self, visit: Visit) -> Response:
        database = visit.services.database
        try:
            role = _role(visit.form.get("role", ""))
            deed = partial(people.invite, rights=visit.rights, by=visit.actor, clock=time.time_ns)
            token = await database.call(deed, database, visit.account_id, visit.form.get("email", ""), role)
        except (FormInvalid, ProvisioningInvalid, RightMissing) as error:
            return await self._page(visit, fault=str(error), status=400)
        url = visit.request.url
        return await self._page(visit, invitation=f"{url.scheme}://{url.netloc}/dashboard/link/{token}")

    async def withdraw(self, visit: Visit) -> Response:
        """All open invitations."""
        deed = partial(people.withdraw_invitations, by=visit.actor, clock=time.time_ns)
        await visit.services.database.call(deed, visit.services.database, visit.account_id)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/members", 303)

    async def change(self, visit: Visit) -> Response:
        """Another role, or with `remove` none."""
        database = visit.services.database
        try:
            role = None if visit.form.get("remove") == "1" else _role(visit.form.get("role", ""))
            deed = partial(people.set_member, rights=visit.rights, by=visit.actor, clock=time.time_ns)
            await database.call(deed, database, visit.account_id, visit.request.path_params["user_id"], role)
        except (FormInvalid, MembershipConflict, RightMissing) as error:
            return await self._page(visit, fault=str(error), status=400)
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/members", 303)

    async def _page(self, visit: Visit, *, invitation: str = "", fault: str = "", status: int = 200) -> Response:
        database = visit.services.database
        members = await database.call(people.list_members, database, visit.account_id)
        count = partial(people.count_invitations, clock=time.time_ns)
        open_invitations = await database.call(count, database, visit.account_id)
        owns = visit.may(Right.APPOINT_OWNERS)
        return self._pages.page(
            visit,
            "members.html.j2",
            here="members",
            title="Members",
            status=status,
            members=members,
            roles=[role for role in Role if owns or role is not Role.OWNER],
            all_roles=tuple(Role),
            rights=RIGHTS,
            all_rights=tuple(Right),
            invitation=invitation,
            open_invitations=open_invitations,
            invitation_hours=INVITATION_NS // 3_600_000_000_000,
            fault=fault,
            form=visit.form if fault else {},
        )


def _role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        raise FormInvalid("Choose a role.") from None
