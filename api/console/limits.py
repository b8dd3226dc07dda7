"""GET /console/v1/accounts/{account_id}/limits: what the key that asks may take, what is left of it, and where.

Looking takes nothing, and the numbers are those of the headers. Limits are set by the operator's command line alone:
a tenant that could raise its own would have none.
"""

from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from api.auth import owned
from api.console.schemas import read_query
from api.rate_limit_headers import limit, rate_limit_headers, remaining, reset_s
from api.services import Services
from tenancy.claims import Standing
from tenancy.principal import Scope
from tenancy.quotas import Quota


class LimitsQuery(BaseModel):
    """model: also the limits that are about it."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""


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
            body["rules"] = [_rule(quota) for quota in principal.quotas]
        return Response(orjson.dumps(body), headers=rate_limit_headers(standings), media_type="application/json")


def _standing(standing: Standing) -> dict[str, Any]:
    return {
        "meter": standing.claim.meter.value,
        "limit": limit(standing),
        "remaining": remaining(standing),
        "reset_seconds": reset_s(standing),
    }


def _rule(quota: Quota) -> dict[str, Any]:
    return {
        "meter": quota.meter.value,
        "limit": quota.limit,
        "project_id": quota.project_id,
        "key_id": quota.key_id,
        "model": quota.model,
    }
