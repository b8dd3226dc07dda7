"""What one process knows of the models that may sleep, for gateway/lifecycle/resting.py. Made by wiring.py."""

import time
from collections import Counter
from collections.abc import Iterator

from api.lifecycle import Lifecycle
from api.settings import Settings
from gateway.fleet import Fleet
from gateway.lifecycle.resting import Resting, Sleeper
from gateway.lifecycle.uses import UseStore
from gateway.replica import Replica
from tenancy.database import Database


def open_resting(settings: Settings, database: Database, lifecycle: Lifecycle, fleet: Fleet) -> Resting:
    return Resting(
        lifecycle.store,
        UseStore(database),
        database.call,
        interval_s=settings.lifecycle.rest_interval_s,
        models=lambda: _sleepers(lifecycle, fleet),
        wished=lifecycle.wished,
        clock=time.time_ns,
    )


def _sleepers(lifecycle: Lifecycle, fleet: Fleet) -> Iterator[Sleeper]:
    for served in fleet.all():
        serverless = lifecycle.serverless.get(served.model)
        if serverless is None:
            continue
        ended: Counter[str] = Counter()
        for engine in served.engines():
            ended[engine.unit] += engine.ended
        yield Sleeper(
            served.model,
            serverless,
            lifecycle.waking.records(served.model),
            busy=frozenset(engine.unit for engine in served.engines() if _is_busy(engine)),
            ended=ended,
            waiting=len(served.room) > 0,
            sides=lifecycle.sides.get(served.model, {}),
        )


def _is_busy(engine: Replica) -> bool:
    """Does anything run there or wait, ours by the ledger or another's by its last report?"""
    seen = engine.snapshot
    return len(engine.ledger) > 0 or (seen is not None and seen.running + seen.waiting > 0)
