"""What a process's scaler looks at: the models in force, their doors, units, bounds, start times. Made by wiring.py."""

import secrets
import time
from collections.abc import Iterator
from datetime import datetime

from prometheus_client import CollectorRegistry

from api.lifecycle import Lifecycle, utc_now
from api.settings import Settings
from backends.serverless import Serverless
from gateway.fleet import Fleet
from gateway.lifecycle.demand import Half
from gateway.lifecycle.demand_store import DemandStore
from gateway.lifecycle.scaler import Scaled, Scaler
from gateway.lifecycle.scaling import Bounds
from gateway.lifecycle.scaling_metrics import ScalingCollector
from gateway.lifecycle.states import Depth, Record, Wish
from gateway.model_fleet import ModelFleet
from tenancy.database import Database

# A process that has said nothing for so many turns is gone.
_TURNS_KEPT = 3


def open_scaler(
    settings: Settings, database: Database, lifecycle: Lifecycle, fleet: Fleet, registry: CollectorRegistry
) -> Scaler:
    """A deployment's; the embedded default has one engine, which nothing scales."""
    interval_s = settings.lifecycle.scaling_interval_s

    def models() -> Iterator[Scaled]:
        for one in fleet.all() if settings.deployment is not None else ():
            yield scaled(one, lifecycle, utc_now(), expected_s=settings.lifecycle.start_seconds_expected)

    scaler = Scaler(
        lifecycle.store,
        DemandStore(database, lately_s=_TURNS_KEPT * interval_s, clock=time.time_ns),
        database.call,
        process=secrets.token_hex(8),
        interval_s=interval_s,
        most=settings.lifecycle.wished_replicas_max,
        models=models,
        wished=lifecycle.wished,
        clock=time.monotonic,
    )
    registry.register(ScalingCollector(scaler.decisions))
    return scaler


def scaled(fleet: ModelFleet, lifecycle: Lifecycle, at: datetime, *, expected_s: float) -> Scaled:
    """One model as it stands. at: now, in UTC. expected_s: of a start of which nothing is known."""
    records, serverless = lifecycle.waking.records(fleet.model), lifecycle.serverless.get(fleet.model)
    return Scaled(
        fleet.model,
        fleet.door,
        bounds_of(serverless, len(records), at),
        records,
        Depth(serverless.depth) if serverless is not None else Depth.STOPPED,
        _start_s(lifecycle, records, expected_s),
        _halves(fleet),
        _held(fleet),
        lifecycle.sides.get(fleet.model, {}),
    )


def bounds_of(serverless: Serverless | None, known: int, at: datetime) -> Bounds | None:
    """None where none of its units is ours to wake."""
    if serverless is None or not known:
        return None
    return Bounds(min(known, serverless.replicas_min_at(at)), min(known, serverless.replicas_max or known))


def _start_s(lifecycle: Lifecycle, records: list[Record], expected_s: float) -> float:
    """Of the next one to wake; of any where all are awake; what is presumed where something else starts them."""
    asleep = [record for record in records if record.wish is not Wish.AWAKE] or records
    starts = [lifecycle.start_s(record.unit, record.depth)[0] for record in asleep]
    return min(starts, default=expected_s)


def _halves(fleet: ModelFleet) -> list[Half]:
    """Prefill halves that answer; each computes prompts for several that decode."""
    halves = dict.fromkeys(half for decode in fleet.replicas if decode.known for half in decode.prefills)
    found = []
    for half in halves:
        if half.answers and half.info is not None and half.snapshot is not None:
            used = half.snapshot.total_pages - half.free_pages
            found.append(Half(used * half.info.page_tokens, half.snapshot.total_pages * half.info.page_tokens))
    return found


def _held(fleet: ModelFleet) -> dict[str, float]:
    """Tokens by unit, its ranks together; a prefill half's where it is a unit of its own."""
    held: dict[str, float] = {}
    for replica in fleet.replicas:
        gate = fleet.gate(replica)
        if gate is not None:
            held[replica.unit] = held.get(replica.unit, 0.0) + gate.total_tokens - gate.free_tokens
        for half in dict.fromkeys(replica.prefills):
            if half.unit != replica.unit and half.info is not None:
                held[half.unit] = float(half.ledger.held_pages * half.info.page_tokens)
    return held
