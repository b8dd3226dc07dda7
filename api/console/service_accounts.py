"""/console/v1/accounts/{account_id}/service_accounts: programs that own keys, managed by its own admin keys."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import key_actor, owned
from api.body import parse, read_body
from api.console.accounts import iso
from api.console.answers import json_answer
from api.errors import InputInvalid
from api.services import Services
from tenancy import service_accounts
from tenancy.accounts import NAME_CHARACTERS_MAX, ServiceAccount
from tenancy.principal import Scope
from tenancy.provisioning import ProvisioningInvalid
from tenancy.roles import Role

T = TypeVar("T")


class ServiceAccountBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]
    role: Role = Role.DEVELOPER


class ServiceAccountChangeBody(BaseModel):
    """disabled: all its keys are refused. null leaves things as they are."""

    model_config = ConfigDict(extra="forbid")

    role: Role | None = None
    disabled: Annotated[bool, Field(strict=True)] | None = None


class ServiceAccountRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_service_accounts(self, request: Request) -> Response:
        """Every service account of the account, oldest first."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        found = await self._call(service_accounts.list_service_accounts, principal.account_id)
        return json_answer({"service_accounts": [_service_account(one) for one in found]})

    async def one_service_account(self, request: Request) -> Response:
        """One service account."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        service_account_id = request.path_params["service_account_id"]
        found = await self._call(service_accounts.get_service_account, principal.account_id, service_account_id)
        return json_answer(_service_account(found))

    async def add(self, request: Request) -> Response:
        """A new service account. Keys are issued for it with `service_account_id`."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(ServiceAccountBody, await read_body(request))
        deed = partial(service_accounts.add_service_account, by=key_actor(principal))
        added = await self._call(deed, principal.account_id, body.name, body.role)
        return json_answer(_service_account(added), status=201)

    async def change(self, request: Request) -> Response:
        """Another role, or disabled: its keys heed it within a second."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(ServiceAccountChangeBody, await read_body(request))
        deed = partial(
            service_accounts.change_service_account, role=body.role, disabled=body.disabled, by=key_actor(principal)
        )
        service_account_id = request.path_params["service_account_id"]
        return json_answer(_service_account(await self._call(deed, principal.account_id, service_account_id)))

    async def _call(self, deed: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._services.database.call(deed, self._services.database, *arguments)
        except ProvisioningInvalid as error:
            raise InputInvalid((), str(error)) from error


def _service_account(found: ServiceAccount) -> dict[str, Any]:
    return {
        "id": found.id,
        "name": found.name,
        "role": found.role.value,
        "state": "disabled" if found.disabled else "enabled",
        "created_at": iso(found.created_at_ns),
    }
