"""GET /console/v1/units, POST /console/v1/units/orders: which engines are awake, and an operator's orders to them."""

import time
from functools import partial
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from api.auth import key_actor, permitted
from api.body import parse, read_body
from api.services import Services
from billing.instants import instant_text
from gateway.lifecycle.orders import Order, give_order
from gateway.lifecycle.states import Depth, Record, State
from gateway.lifecycle.telling import is_kept, retry_in_s, told
from tenancy.principal import Scope


class OrderBody(BaseModel):
    """unit: one of the model's; left out: all of them. depth: how deep it is to sleep."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200)
    unit: str | None = Field(default=None, min_length=1, max_length=63)
    order: Literal["wake", "sleep", "drain"]
    depth: Literal["stopped", "released"] = "stopped"


class UnitRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def all_units(self, request: Request) -> Response:
        """Every unit that any gateway of this database looks after, with its state and what is wished of it."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        records = await self._services.database.call(self._services.lifecycle.store.all)
        return _json(records)

    async def order(self, request: Request) -> Response:
        """Let units wake, sleep until they are needed, or sleep until told otherwise (`drain`)."""
        principal = await permitted(request, self._services, Scope.OPERATOR_WRITE)
        body = parse(OrderBody, await read_body(request))
        give = partial(give_order, by=key_actor(principal), depth=Depth(body.depth))
        store = self._services.lifecycle.store
        return _json(await self._services.database.call(give, store, Order(body.order), body.model, body.unit))


def unit_fields(record: Record, now_ns: int) -> dict[str, Any]:
    """As the console, the command line and the dashboard show it. kept: by a gateway that lives; else it stands as it
    was left.
    """
    return {
        "model": record.unit.model,
        "unit": record.unit.name,
        "state": record.state.value,
        "depth": record.depth.value if record.state is State.ASLEEP else None,
        "since": instant_text(record.since_ns),
        "wish": record.wish.value,
        "wished_by": record.wish_by.value,
        "failures": record.failures,
        "why": record.why or None,
        "again_in_s": retry_in_s(record, now_ns),
        "place": record.unit.place or None,
        "owner": record.owner,
        "kept": is_kept(record, now_ns),
        "told": told(record, now_ns),
    }


def _json(records: list[Record]) -> Response:
    now_ns = time.time_ns()
    rows = [unit_fields(record, now_ns) for record in records]
    return Response(orjson.dumps({"units": rows}), media_type="application/json")
