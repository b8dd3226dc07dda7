"""/console/v1/accounts/{account_id}/projects: its own admin keys list, open, rename, bind and archive projects."""

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
from api.console.schemas import ModelList
from api.errors import InputInvalid
from api.services import Services
from tenancy import projects
from tenancy.accounts import NAME_CHARACTERS_MAX, Project
from tenancy.principal import Scope
from tenancy.provisioning import ProvisioningInvalid

T = TypeVar("T")

_Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]


class ProjectBody(BaseModel):
    """models: all that the project's keys may use; null is what the account may. A key's own list narrows it."""

    model_config = ConfigDict(extra="forbid")

    name: _Name
    models: ModelList | None = None


class ProjectChangeBody(BaseModel):
    """archived: the project's keys are refused; false takes it back. null leaves name and state as they are.

    models: all that the project's keys may use; null is what the account may. What is not named stays.
    """

    model_config = ConfigDict(extra="forbid")

    name: _Name | None = None
    archived: Annotated[bool, Field(strict=True)] | None = None
    models: ModelList | None = None


class ProjectRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_projects(self, request: Request) -> Response:
        """Every project of the account, its default one first."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        found = await self._call(projects.list_projects, principal.account_id)
        return json_answer({"projects": [_project(project) for project in found]})

    async def one_project(self, request: Request) -> Response:
        """One project."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        found = await self._call(projects.get_project, principal.account_id, request.path_params["project_id"])
        return json_answer(_project(found))

    async def open(self, request: Request) -> Response:
        """Open a project."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(ProjectBody, await read_body(request))
        deed = partial(projects.open_project, models=body.models, by=key_actor(principal))
        return json_answer(_project(await self._call(deed, principal.account_id, body.name)), status=201)

    async def change(self, request: Request) -> Response:
        """Rename a project, archive it or take it back, say what models its keys may use. It holds within a second."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(ProjectChangeBody, await read_body(request))
        project_id, by = request.path_params["project_id"], key_actor(principal)
        binding = projects.Binding(body.models) if "models" in body.model_fields_set else None
        deed = partial(projects.change_project, name=body.name, archived=body.archived, binding=binding, by=by)
        return json_answer(_project(await self._call(deed, principal.account_id, project_id)))

    async def _call(self, deed: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._services.database.call(deed, self._services.database, *arguments)
        except ProvisioningInvalid as error:
            raise InputInvalid((), str(error)) from error


def _project(project: Project) -> dict[str, Any]:
    archived_at_ns = project.archived_at_ns
    return {
        "id": project.id,
        "name": project.name,
        "default": project.id == project.account_id,
        "created_at": iso(project.created_at_ns),
        "archived_at": None if archived_at_ns is None else iso(archived_at_ns),
        "models": None if project.models is None else list(project.models),
    }
