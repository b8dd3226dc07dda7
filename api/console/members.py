"""/console/v1/accounts/{account_id}/members and …/invitations: who may sign in to an account, and as what.

For the account's admin keys, which may do what the role admin may: nobody but an owner touches owners, and owners are
appointed in the dashboard or by the command line.
"""

import time
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from api.auth import key_actor, owned
from api.body import parse, read_body
from api.console.accounts import iso
from api.console.answers import NOT_KEPT, json_answer
from api.errors import InputInvalid
from api.services import Services
from tenancy import people
from tenancy.errors import MemberNotFound
from tenancy.principal import Principal, Scope
from tenancy.provisioning import ProvisioningInvalid
from tenancy.roles import RIGHTS, Role
from tenancy.users import Member

_KEY_RIGHTS = RIGHTS[Role.ADMIN]


class InvitationBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    email: str
    role: Role


class RoleBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Role


class MemberRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def members(self, request: Request) -> Response:
        """Who may sign in to the account, and as what."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        return json_answer({"members": [_member(member) for member in await self._members(principal)]})

    async def invite(self, request: Request) -> Response:
        """A link that makes whoever follows it a member, once, within three days. It is in this answer alone."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(InvitationBody, await read_body(request))
        deed = partial(people.invite, rights=_KEY_RIGHTS, by=key_actor(principal), clock=time.time_ns)
        database = self._services.database
        try:
            token = await database.call(deed, database, principal.account_id, body.email, body.role)
        except ProvisioningInvalid as error:
            raise InputInvalid(("email",), str(error)) from error
        answer = {
            "email": body.email,
            "role": body.role.value,
            "path": f"/dashboard/link/{token}",
            "expires_at": iso(time.time_ns() + people.INVITATION_NS),
        }
        return json_answer(answer, status=201, headers=NOT_KEPT)

    async def withdraw(self, request: Request) -> Response:
        """End all open invitations: nobody joins by their links any more."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        deed = partial(people.withdraw_invitations, by=key_actor(principal), clock=time.time_ns)
        await self._services.database.call(deed, self._services.database, principal.account_id)
        return Response(status_code=204)

    async def change(self, request: Request) -> Response:
        """Give a member another role."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(RoleBody, await read_body(request))
        user_id = request.path_params["user_id"]
        await self._set(principal, user_id, body.role)
        for member in await self._members(principal):
            if member.user.id == user_id:
                return json_answer(_member(member))
        raise MemberNotFound("There is no such member in this account.")  # removed in the same moment

    async def remove(self, request: Request) -> Response:
        """Make somebody a member no longer."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        await self._set(principal, request.path_params["user_id"], None)
        return Response(status_code=204)

    async def _members(self, principal: Principal) -> list[Member]:
        database = self._services.database
        return await database.call(people.list_members, database, principal.account_id)

    async def _set(self, principal: Principal, user_id: str, role: Role | None) -> None:
        deed = partial(people.set_member, rights=_KEY_RIGHTS, by=key_actor(principal), clock=time.time_ns)
        database = self._services.database
        await database.call(deed, database, principal.account_id, user_id, role)


def _member(member: Member) -> dict[str, Any]:
    user = member.user
    return {
        "user_id": user.id,
        "email": user.email,
        "name": user.name,
        "role": member.role.value,
        "disabled": user.disabled,
        "created_at": iso(user.created_at_ns),
    }
