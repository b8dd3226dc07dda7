"""GET /console/v1/invariants and /console/v1/capacity, POST /console/v1/replicas/{id}/drain: for operators."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from api.auth import permitted
from api.body import parse, read_body
from api.console.together import capacity_together, held_together
from api.console.units import unit_fields
from api.services import Services
from gateway.errors import ReplicaNotFound
from gateway.gate import Gate
from gateway.model_fleet import ModelFleet
from gateway.replica import Replica
from tenancy.principal import Scope


class DrainBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    draining: bool


class OperationRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def invariants(self, request: Request) -> Response:
        """What is held now, and every rule that is broken, as sentences. `ok` is that there are none."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        return _json(await invariants_of(self._services))

    async def capacity(self, request: Request) -> Response:
        """Each replica's last report beside what is promised there, who waits, and when pages come free."""
        await permitted(request, self._services, Scope.OPERATOR_READ)
        return _json(await capacity_together_of(self._services))

    async def drain(self, request: Request) -> Response:
        """Send a replica nothing new, until it is told otherwise; what it has goes on."""
        await permitted(request, self._services, Scope.OPERATOR_WRITE)
        body = parse(DrainBody, await read_body(request))
        replica_id = request.path_params["replica_id"]
        if not drain_here(self._services, replica_id, draining=body.draining):
            raise ReplicaNotFound(replica_id)
        await self._services.siblings.ask("drain", replica_id=replica_id, draining=body.draining)
        return _json({"id": replica_id, "draining": body.draining})


async def invariants_of(services: Services) -> dict[str, Any]:
    """For the dashboard too: both say the same. What is held is held by all workers together."""
    await services.settled()
    broken = await services.database.call(services.usage.violations)
    all_held = [held_here(services), *(await services.siblings.ask("held")).values()]
    violations = [*broken, *(sentence for one in all_held for sentence in one["violations"])]
    held = held_together(one["held"] for one in all_held)
    return {"ok": not violations, **held, "violations": violations}


def held_here(services: Services) -> dict[str, Any]:
    """What this process holds, and what of it is held for nobody."""
    held = _held(services)
    return {"held": held, "violations": [*_leaks(held), *_strangers(services)]}


async def capacity_together_of(services: Services) -> dict[str, Any]:
    """For the dashboard too: both say the same."""
    return capacity_together(capacity_of(services), (await services.siblings.ask("capacity")).values())


def drain_here(services: Services, replica_id: str, *, draining: bool) -> bool:
    """Whether this process knows the replica, and now sends it nothing new, or does again."""
    return any(fleet.drain(replica_id, draining=draining) for fleet in services.fleet.all())


def capacity_of(services: Services) -> dict[str, Any]:
    """As this process sees it, and what it holds alone."""
    now = time.monotonic()
    return {
        "models": [{**_model(fleet, now), "units": _units(services, fleet.model)} for fleet in services.fleet.all()]
    }


def _units(services: Services, model: str) -> list[dict[str, Any]]:
    """As this process last heard of them: within half a second."""
    records = sorted(services.lifecycle.waking.records(model), key=lambda record: record.unit)
    return [unit_fields(record, time.time_ns()) for record in records]


def _held(services: Services) -> dict[str, int]:
    holds = services.holds
    replicas = [replica for fleet in services.fleet.all() for replica in fleet.engines()]
    return {
        "live_holds": len(holds.live),
        "live_slots": holds.meters.live_slots(),
        "held_nano": holds.credit.held_nano(),
        "kv_pages_held": sum(replica.ledger.held_pages for replica in replicas),
    }


def _strangers(services: Services) -> Iterator[str]:
    """Pages belong to live requests, however many those are. Slots and money are taken a moment before a request is
    live, so they can be judged only when none is.
    """
    live = services.holds.live
    for fleet in services.fleet.all():
        for replica in fleet.engines():
            gone = sum(1 for request_id in replica.ledger.holders() if request_id not in live)
            if gone and live:
                yield f"{replica.id} holds pages for {gone} requests that are not live"


def _leaks(held: dict[str, int]) -> Iterator[str]:
    """Nothing may be held for nobody."""
    if held["live_holds"] == 0:
        for name in ("live_slots", "held_nano", "kv_pages_held"):
            if held[name]:
                yield f"no request is live, but {name} is {held[name]}"


def _model(fleet: ModelFleet, now: float) -> dict[str, Any]:
    placing, door = fleet.placing, fleet.door
    return {
        "model": fleet.model,
        "up": fleet.up,
        "waiting_for_pages": len(fleet.room),
        "waiting": _waiting(fleet, now),
        "kept_places": len(door.promises),
        "admitted": fleet.admitted,
        "engine_queued": sum(replica.queue.joined for replica in fleet.replicas),
        "forecast_covered_share": round(placing.coverage.share, 4),
        "forecast_decisions": placing.coverage.decisions,
        "step_ms": round(placing.experience.speed.step_s * 1000, 3),
        "prefill_tokens_s": round(1 / placing.experience.speed.prefill_token_s),
        "replicas": [_replica(fleet, replica, now) for replica in fleet.engines()],
    }


def _waiting(fleet: ModelFleet, now: float) -> list[dict[str, Any]]:
    """Of each account that waits: how many, how long its first has, and the service it has had."""
    queue = fleet.door.queue
    accounts: dict[tuple[int, str], dict[str, Any]] = {}
    for entry in queue:
        row = accounts.setdefault(
            (entry.tier, entry.tenant),
            {
                "account_id": entry.tenant,
                "tier": entry.tier,
                "weight_percent": round(entry.weight * 100),
                "requests": 0,
                "prompt_tokens": 0,
                "first_waits_ms": 0,
                "served_s": round(queue.counter(entry.tenant, entry.tier), 3),
            },
        )
        row["requests"] += 1
        row["prompt_tokens"] += entry.tokens
        row["first_waits_ms"] = max(row["first_waits_ms"], round((now - entry.item.arrived_at) * 1000))
    return [accounts[key] for key in sorted(accounts)]


def _replica(fleet: ModelFleet, replica: Replica, now: float) -> dict[str, Any]:
    """The engine's figures are null while it does not answer: neither idle nor full. prompts: of a prefill half alone,
    as forecast is of all others.
    """
    seen, gate, half = replica.snapshot, fleet.gate(replica), fleet.placing.halves.get(replica.id)
    return {
        "id": replica.id,
        "role": fleet.role(replica),
        "region": replica.region,
        "round_trip_ms": round(fleet.regions.round_trip_s(replica.region) * 1000, 1),
        "standing": replica.standing(now).value,
        "held_pages": replica.ledger.held_pages,
        "live_requests": len(replica.ledger),
        "page_tokens": None if replica.info is None else replica.info.page_tokens,
        "ghost_requests": replica.ghosts.unknown,
        "forecast": None if gate is None else _forecast(gate),
        "prompts": None if half is None else {"inside": len(half), "computed_in_s": round(half.prefilling_s(), 3)},
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
        "engine": None if replica.figures is None else asdict(replica.figures),
    }


def _forecast(gate: Gate) -> dict[str, Any]:
    """In tokens. release: seconds from now, and what requests inside then have in use at most, nine times of ten."""
    return {
        "total_tokens": gate.total_tokens,
        "free_tokens": round(gate.free_tokens),
        "peak_tokens": round(gate.peak()),
        "drift_tokens": gate.drift_tokens,
        "prefilling_s": round(gate.prefilling_s(), 3),
        "release": [[round(seconds, 2), tokens] for seconds, tokens in gate.release_curve(0.9)],
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
