"""GET /health/live, /health/ready and /metrics: for orchestrators and Prometheus. Open: no key, no tenant's data."""

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from api.services import Services


class HealthRoutes:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def live(self, _request: Request) -> Response:
        """The process answers. Says nothing of engines or the database: restarting it would not help them."""
        return _json({"status": "live"})

    async def ready(self, _request: Request) -> Response:
        """May traffic come? 503 with the reason until the engine and the database answer."""
        ready, reason = self._services.ready()
        return _json({"status": "ready"}) if ready else _json({"status": "not ready", "reason": reason}, status=503)

    async def metrics(self, _request: Request) -> Response:
        """Prometheus text. Open like the others: bind to loopback, or let the proxy in front keep it from outside."""
        return Response(generate_latest(self._services.registry), headers={"content-type": CONTENT_TYPE_LATEST})


def _json(body: dict[str, str], *, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
