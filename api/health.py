"""GET /health/live, /health/ready and /metrics: for orchestrators and Prometheus. Open: no key, no tenant's data.

Of several workers any may be asked, and answers for all that serve.
"""

from typing import Any, Final

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from api.services import Services
from api.worker_metrics import counted, text_of

READY: Final = "ready"


class HealthRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def live(self, _request: Request) -> Response:
        """The process answers. Says nothing of engines or the database: restarting it would not help them."""
        return _json({"status": "live"})

    async def ready(self, _request: Request) -> Response:
        """May traffic come? 503 with the reason until the engine answers and usage can be recorded.

        `degraded`, and 200, while the database is away: it is every gateway's, so taking all out would help nobody,
        and what was allowed before is served. A worker that is being started again takes no traffic, so it is not
        waited for; one that can't serve is.
        """
        ready, reason = self._services.ready()
        siblings = self._services.siblings
        if not siblings.others:
            return _ready(reason) if ready else _not_ready(reason)
        standing = {siblings.name: [ready, reason], **await siblings.ask("ready")}
        workers = {"workers": {"serving": len(standing), "of": 1 + len(siblings.others)}}
        for name, (one_ready, one_reason) in sorted(standing.items()):
            if not one_ready:
                return _not_ready(f"worker {name}: {one_reason}", workers)
        reasons = [one_reason for _, one_reason in standing.values() if one_reason != READY]
        return _ready(reasons[0] if reasons else READY, workers)

    async def metrics(self, _request: Request) -> Response:
        """Prometheus text. Open like the others: bind to loopback, or let the proxy in front keep it from outside."""
        services = self._services
        headers = {"content-type": CONTENT_TYPE_LATEST}
        if not services.siblings.others:
            return Response(generate_latest(services.registry), headers=headers)
        others = await services.siblings.ask("metrics", beside_too=True)
        return Response(text_of({services.siblings.name: counted(services.registry), **others}), headers=headers)


def _ready(reason: str, more: dict[str, Any] | None = None) -> Response:
    said = {"status": READY} if reason == READY else {"status": "degraded", "reason": reason}
    return _json({**said, **(more or {})})


def _not_ready(reason: str, more: dict[str, Any] | None = None) -> Response:
    return _json({"status": "not ready", "reason": reason, **(more or {})}, status=503)


def _json(body: dict[str, Any], *, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
