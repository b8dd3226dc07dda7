"""What a worker answers its siblings (api/siblings.py carries it)."""

from functools import partial
from typing import Any

from api.console.operations import capacity_of, drain_here, held_here
from api.dashboard.live import figures_here
from api.services import Services
from api.siblings import Answers
from api.worker_metrics import counted


def answers_of(services: Services) -> Answers:
    """By question."""
    return {
        "ready": partial(_ready, services),
        "flush": partial(_flush, services),
        "held": partial(_held, services),
        "capacity": partial(_capacity, services),
        "figures": partial(_figures, services),
        "metrics": partial(_metrics, services),
        "drain": partial(_drain, services),
    }


async def _ready(services: Services, _words: dict[str, Any]) -> tuple[bool, str]:
    return services.ready()


async def _flush(services: Services, _words: dict[str, Any]) -> bool:
    await services.metering.flush()
    return True


async def _held(services: Services, _words: dict[str, Any]) -> dict[str, Any]:
    return held_here(services)


async def _capacity(services: Services, _words: dict[str, Any]) -> dict[str, Any]:
    return capacity_of(services)


async def _figures(services: Services, _words: dict[str, Any]) -> dict[str, Any]:
    return figures_here(services)


async def _metrics(services: Services, _words: dict[str, Any]) -> list[list[Any]]:
    return counted(services.registry)


async def _drain(services: Services, words: dict[str, Any]) -> bool:
    return drain_here(services, words["replica_id"], draining=words["draining"])
