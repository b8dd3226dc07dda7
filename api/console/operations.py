"""GET /console/v1/invariants and /console/v1/capacity: for operators, about the whole service."""

import time
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.services import Services
from gateway.fleet import ModelFleet
from gateway.replica import Replica
from tenancy.principal import Scope


class OperationRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def invariants(self, request: Request) -> Response:
        """What is held now, and every rule that is broken, as sentences. `ok` is that there are none."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        await self._services.metering.flush()
        broken = await self._services.database.call(self._services.usage.violations)
        held = self._held()
        violations = [*broken, *_leaks(held)]
        return _json({"ok": not violations, **held, "violations": violations})

    async def capacity(self, request: Request) -> Response:
        """Each replica's last report beside what is promised there."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        now = time.monotonic()
        return _json({"models": [_model(fleet, now) for fleet in self._services.fleet.all()]})

    def _held(self) -> dict[str, int]:
        holds = self._services.holds
        replicas = [replica for fleet in self._services.fleet.all() for replica in fleet.engines()]
        return {
            "live_holds": len(holds.live),
            "live_slots": holds.meters.live_slots(),
            "held_nano": holds.credit.held_nano(),
            "kv_pages_held": sum(replica.ledger.held_pages for replica in replicas),
        }


def _leaks(held: dict[str, int]) -> Iterator[str]:
    """Nothing may be held for nobody."""
    if held["live_holds"] == 0:
        for name in ("live_slots", "held_nano", "kv_pages_held"):
            if held[name]:
                yield f"no request is live, but {name} is {held[name]}"


def _model(fleet: ModelFleet, now: float) -> dict[str, Any]:
    return {
        "model": fleet.model,
        "up": fleet.up,
        "waiting_for_pages": len(fleet.room),
        "replicas": [_replica(replica, now) for replica in fleet.engines()],
    }


def _replica(replica: Replica, now: float) -> dict[str, Any]:
    """The engine's figures are null while it does not answer: neither idle nor full."""
    seen = replica.snapshot
    return {
        "id": replica.id,
        "held_pages": replica.ledger.held_pages,
        "live_requests": len(replica.ledger),
        "page_tokens": None if replica.info is None else replica.info.page_tokens,
        "reported": None
        if seen is None
        else {
            "age_ms": round((now - seen.taken_at) * 1000),
            "total_pages": seen.total_pages,
            "used_pages": seen.used_pages,
            "running": seen.running,
            "waiting": seen.waiting,
            "running_max": seen.running_max,
        },
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
