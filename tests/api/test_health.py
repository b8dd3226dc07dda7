"""Probes and metrics are open and say why."""

from starlette.types import ASGIApp

from tests.api.exchange import get
from tests.fakes import Fakes


async def test_live_needs_nothing(app: ASGIApp, fakes: Fakes) -> None:
    fakes.is_ready = (False, "the engine is starting")
    answer = await get(app, "/health/live", key=None)
    assert (answer.status, answer.json) == (200, {"status": "live"})


async def test_ready_says_why_not(app: ASGIApp, fakes: Fakes) -> None:
    assert (await get(app, "/health/ready", key=None)).json == {"status": "ready"}
    fakes.is_ready = (False, "the engine is starting")
    answer = await get(app, "/health/ready", key=None)
    assert (answer.status, answer.json) == (503, {"status": "not ready", "reason": "the engine is starting"})


async def test_ready_says_what_is_amiss_and_stays_in_rotation(app: ASGIApp, fakes: Fakes) -> None:
    fakes.is_ready = (True, "the database does not answer")
    answer = await get(app, "/health/ready", key=None)
    assert (answer.status, answer.json) == (200, {"status": "degraded", "reason": "the database does not answer"})


async def test_metrics_are_prometheus_text(app: ASGIApp) -> None:
    await get(app, "/health/live")
    answer = await get(app, "/metrics", key=None)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert 'pagegate_http_requests_total{method="GET",route="/health/live",status="200"} 1.0' in answer.body.decode()
