"""/console/v1/accounts/{account_id}/limits: what the key that asks may take and where, and the rules.

Looking takes nothing, and the numbers are those of the headers. What an account may take in all is the operator's to
say: a tenant that could raise its own would have none. Its admin keys divide that among its projects and keys.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import governed, key_actor, owned, rule_setter
from api.body import parse, read_body
from api.console.answers import json_answer
from api.console.schemas import Name, read_query
from api.errors import InputInvalid
from api.rate_limit_headers import limit, rate_limit_headers, remaining, reset_s
from api.services import Services
from tenancy import provisioning
from tenancy.claims import Meter, Standing
from tenancy.principal import Scope
from tenancy.provisioning import ProvisioningInvalid
from tenancy.quotas import LIMIT_MAX, Quota
from tenancy.rule_setters import RuleSetter

T = TypeVar("T")


class LimitsQuery(BaseModel):
    """model: also the limits that are about it."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""


class RuleQuery(BaseModel):
    """Which rule: that of this meter for this project, key and model."""

    model_config = ConfigDict(extra="forbid")

    meter: Meter
    project_id: Name | None = None
    key_id: Name | None = None
    model: Name | None = None


class RemovalQuery(RuleQuery):
    """set_by: whose, where both an operator and the account set one."""

    set_by: RuleSetter | None = None


class RuleBody(RuleQuery):
    """limit: in whole requests, tokens or neurons. Without a project and a key the rule is the whole account's."""

    limit: Annotated[int, Field(strict=True, ge=1, le=LIMIT_MAX)]


class LimitRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def limits(self, request: Request) -> Response:
        """Limits that apply to this key now; an admin key also sees every rule of the account."""
        principal = await owned(request, self._services, Scope.AI_READ)
        query = read_query(LimitsQuery, request)
        standings = await self._services.holds.meters.standings(principal, query.model)
        body: dict[str, Any] = {
            "account_id": principal.account_id,
            "regions": None if principal.regions is None else sorted(principal.regions),
            "limits": [_standing(standing) for standing in standings if standing.claim.limit is not None],
        }
        if Scope.ACCOUNT_ADMIN in principal.scopes:
            body["rules"] = [rule_fields(quota) for quota in principal.quotas]
        return Response(orjson.dumps(body), headers=rate_limit_headers(standings), media_type="application/json")

    async def set_rule(self, request: Request) -> Response:
        """Set a limit, in place of one's own for the same meter, project, key and model. It holds within a second.

        An account's own admin keys limit its projects and keys; what it may take in all is for `operator:write`, and
        what an operator sets of a project or key stays beside the account's own: the tighter holds.
        """
        principal, account_id = await governed(request, self._services)
        rule = parse(RuleBody, await read_body(request))
        setter = rule_setter(principal)
        deed = partial(provisioning.set_quota, **_bounds(rule), setter=setter, by=key_actor(principal))
        return json_answer(rule_fields(await self._call(deed, account_id, rule.meter, rule.limit)))

    async def remove_rule(self, request: Request) -> Response:
        """Remove a limit: one's own, or for `operator:write` else the account's. It holds within a second."""
        principal, account_id = await governed(request, self._services)
        rule = read_query(RemovalQuery, request)
        remover = rule_setter(principal)
        deed = partial(
            provisioning.remove_quota, **_bounds(rule), set_by=rule.set_by, remover=remover, by=key_actor(principal)
        )
        await self._call(deed, account_id, rule.meter)
        return Response(status_code=204)

    async def _call(self, deed: Callable[..., T], *arguments: object) -> T:
        try:
            return await self._services.database.call(deed, self._services.database, *arguments)
        except ProvisioningInvalid as error:
            raise InputInvalid((), str(error)) from error


def _bounds(rule: RuleQuery) -> dict[str, Any]:
    return rule.model_dump(include={"project_id", "key_id", "model"})


def _standing(standing: Standing) -> dict[str, Any]:
    return {
        "meter": standing.claim.meter.value,
        "limit": limit(standing),
        "remaining": remaining(standing),
        "reset_seconds": reset_s(standing),
    }


def rule_fields(quota: Quota) -> dict[str, Any]:
    return {
        "meter": quota.meter.value,
        "limit": quota.limit,
        "project_id": quota.project_id,
        "key_id": quota.key_id,
        "model": quota.model,
        "set_by": quota.set_by.value,
    }
