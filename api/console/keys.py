"""/console/v1/accounts/{account_id}/keys: an account's own admin keys list, issue, rotate, disable and revoke its keys.

Nobody can issue a key that may do more than the key it was issued with. A key's text is in one answer, once.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, IPvAnyNetwork
from starlette.requests import Request
from starlette.responses import Response

from api.auth import key_actor, owned
from api.body import parse, read_body
from api.console.accounts import iso
from api.console.schemas import Instant, Name
from api.errors import InputInvalid
from api.services import Services
from tenancy import provisioning
from tenancy.accounts import NAME_CHARACTERS_MAX
from tenancy.errors import AddressNotAllowed, ScopeMissing
from tenancy.keys import ApiKey, KeyKind
from tenancy.pepper import open_pepper_of
from tenancy.principal import Network, Principal, Scope
from tenancy.provisioning import GRACE_S_MAX, LIST_MAX, IssuedKey, ProvisioningInvalid

T = TypeVar("T")

_NOT_KEPT: Final = {"cache-control": "no-store"}


def _text(value: object) -> object:
    """Numbers would be read as addresses."""
    if not isinstance(value, str):
        raise ValueError("must be a text.")  # noqa: TRY004  pydantic tells the caller of a ValueError
    return value


_Network = Annotated[IPvAnyNetwork, BeforeValidator(_text)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class KeyBody(_Body):
    """scopes, models, networks: null is all that the kind may have, any model, from anywhere.

    project_id: null for the account's default project. service_account_id: the program that owns it.
    """

    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX)]
    kind: KeyKind = KeyKind.INFERENCE
    scopes: list[Scope] | None = None
    expires_at: Instant | None = None
    models: Annotated[list[str], Field(min_length=1, max_length=LIST_MAX)] | None = None
    networks: Annotated[list[_Network], Field(min_length=1, max_length=LIST_MAX)] | None = None
    project_id: Name | None = None
    service_account_id: Name | None = None


class KeyChangeBody(_Body):
    disabled: Annotated[bool, Field(strict=True)]


class RotationBody(_Body):
    """grace_seconds: the old key goes on working for so long."""

    grace_seconds: Annotated[int, Field(strict=True, ge=0, le=GRACE_S_MAX)] = 3600


class KeyRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_keys(self, request: Request) -> Response:
        """Every key of the account, without texts."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        keys = await self._call(provisioning.list_keys, principal.account_id)
        return _json({"keys": [_key(key) for key in keys]})

    async def one_key(self, request: Request) -> Response:
        """One key, without its text."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        return _json(_key(await self._find(principal, request)))

    async def issue(self, request: Request) -> Response:
        """A new key. Its text is in this answer alone."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(KeyBody, await read_body(request))
        scopes = None if body.scopes is None else frozenset(body.scopes)
        networks = principal.networks if body.networks is None else tuple(body.networks)
        _refuse_more_than_own(principal, body.kind, scopes or frozenset(), networks)
        issued = await self._deed(
            provisioning.issue_key,
            principal.account_id,
            name=body.name,
            kind=body.kind,
            scopes=scopes,
            at_most=principal.scopes if body.kind is KeyKind.ADMIN else None,
            expires_at_ns=body.expires_at,
            models=body.models,
            networks=None if networks is None else [str(network) for network in networks],
            project_id=body.project_id,
            service_account_id=body.service_account_id,
            by=key_actor(principal),
        )
        return _issued(issued)

    async def rotate(self, request: Request) -> Response:
        """A successor of a key, which ends after the grace. The new text is in this answer alone."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(RotationBody, await read_body(request) or b"{}")
        old = await self._find(principal, request)
        _refuse_more_than_own(principal, old.kind, old.scopes, old.networks)
        return _issued(
            await self._deed(
                provisioning.rotate_key,
                principal.account_id,
                old.id,
                grace_s=body.grace_seconds,
                by=key_actor(principal),
            )
        )

    async def change(self, request: Request) -> Response:
        """Disable a key for a while, or enable it again."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(KeyChangeBody, await read_body(request))
        key_id = request.path_params["key_id"]
        deed = partial(provisioning.set_key_disabled, disabled=body.disabled, by=key_actor(principal))
        return _json(_key(await self._call(deed, principal.account_id, key_id)))

    async def revoke(self, request: Request) -> Response:
        """Revoke a key for good: every process refuses it within a second. Its running requests end normally."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        deed = partial(provisioning.revoke_key, by=key_actor(principal), clock=time.time_ns)
        return _json(_key(await self._call(deed, principal.account_id, request.path_params["key_id"])))

    async def _find(self, principal: Principal, request: Request) -> ApiKey:
        return await self._call(provisioning.get_key, principal.account_id, request.path_params["key_id"])

    async def _call(self, deed: Callable[..., T], *arguments: object) -> T:
        return await self._services.database.call(deed, self._services.database, *arguments)

    async def _deed(self, deed: Callable[..., IssuedKey], *arguments: object, **options: object) -> IssuedKey:
        """A deed that hashes a new key; the pepper is read where waiting for a disk holds nobody up."""

        def run() -> IssuedKey:
            pepper = open_pepper_of(self._services.database, self._services.settings.pepper_path)
            return deed(self._services.database, pepper, *arguments, clock=time.time_ns, **options)

        try:
            return await self._services.database.call(run)
        except ProvisioningInvalid as error:
            raise InputInvalid((), str(error)) from error


def _refuse_more_than_own(
    principal: Principal, kind: KeyKind, scopes: frozenset[Scope], networks: tuple[Network, ...] | None
) -> None:
    """Raises ScopeMissing or AddressNotAllowed. An admin key may let others infer, though it can't itself."""
    if kind is KeyKind.ADMIN and not scopes <= principal.scopes:
        missing = ", ".join(sorted(scopes - principal.scopes))
        raise ScopeMissing(f"This API key can't grant scopes that it lacks: {missing}.")
    if principal.networks is not None and not _inside(networks, principal.networks):
        raise AddressNotAllowed("This API key is bound to networks and can't grant others.")


def _inside(networks: tuple[Network, ...] | None, bounds: tuple[Network, ...]) -> bool:
    if networks is None:
        return False
    return all(
        any(network.version == bound.version and network.subnet_of(bound) for bound in bounds)  # type: ignore[arg-type]  # versions are equal
        for network in networks
    )


def _issued(issued: IssuedKey) -> Response:
    return Response(
        orjson.dumps({"key": issued.text, **_key(issued.key)}),
        201,
        headers=_NOT_KEPT,
        media_type="application/json",
    )


def _key(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "project_id": key.project,
        "service_account_id": key.service_account_id,
        "kind": key.kind.value,
        "hint": key.hint,
        "scopes": sorted(scope.value for scope in key.scopes),
        "state": "revoked" if key.revoked_at_ns is not None else "disabled" if key.disabled else "enabled",
        "created_at": iso(key.created_at_ns),
        "expires_at": None if key.expires_at_ns is None else iso(key.expires_at_ns),
        "revoked_at": None if key.revoked_at_ns is None else iso(key.revoked_at_ns),
        "last_used_at": None if key.last_used_at_ns is None else iso(key.last_used_at_ns),
        "lineage_id": key.lineage,
        "models": None if key.models is None else list(key.models),
        "networks": None if key.networks is None else [str(network) for network in key.networks],
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
