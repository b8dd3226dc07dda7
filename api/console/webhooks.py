"""/console/v1/accounts/{account_id}/webhooks: an account's own admin keys add, list and remove webhook endpoints.

A secret is in one answer, once: the one that adds its endpoint.
"""

from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import key_actor, owned
from api.body import parse, read_body
from api.console.accounts import iso
from api.services import Services
from billing.webhooks.endpoints import Endpoint
from tenancy.principal import Scope


class WebhookBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    url: Annotated[str, Field(max_length=2_000, json_schema_extra={"pattern": "^https://"})]


class WebhookRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_webhooks(self, request: Request) -> Response:
        """Every endpoint, with how many messages wait for it."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        found = await self._services.database.call(self._services.webhooks.all_of, principal.account_id)
        return _json({"webhooks": [_endpoint(endpoint) for endpoint in found]})

    async def add(self, request: Request) -> Response:
        """A new endpoint: budgets' thresholds and invoices are sent to it from now on. Its secret is here alone."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        body = parse(WebhookBody, await read_body(request))
        add = partial(self._services.webhooks.add, by=key_actor(principal))
        added = await self._services.database.call(add, principal.account_id, body.url)
        answer = _json({**_endpoint(added.endpoint), "secret": added.secret}, status=201)
        answer.headers["cache-control"] = "no-store"
        return answer

    async def remove(self, request: Request) -> Response:
        """What waits for the endpoint is dropped."""
        principal = await owned(request, self._services, Scope.ACCOUNT_ADMIN)
        webhook_id = request.path_params["webhook_id"]
        remove = partial(self._services.webhooks.remove, by=key_actor(principal))
        await self._services.database.call(remove, principal.account_id, webhook_id)
        return Response(status_code=204)


def _endpoint(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "id": endpoint.id,
        "url": endpoint.url,
        "created_at": iso(endpoint.created_at_ns),
        "waiting": endpoint.waiting,
    }


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
