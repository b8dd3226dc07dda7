"""What the port answers while the database has not answered since the start: that it does not, in each dialect's words.

Used by the command that serves, before there are any services. Knows no route but those of health.
"""

import asyncio
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.middleware import BodyBounds, RequestCounts, RequestRim
from api.refusals import refusal
from api.serving import Server, server_config
from api.settings import Settings
from tenancy.errors import TenancyUnavailable
from tenancy.metrics import DatabaseCollector

T = TypeVar("T")

_RETRY_AFTER_S: Final = 2


async def answer_until(listener: socket.socket, settings: Settings, found: Coroutine[Any, Any, T]) -> T | None:
    """Refuse all requests until `found` ends, and return what it does; None if a signal said to stop before.

    The listener stays open: who connects between this and the service waits for the service.
    """
    server = Server(server_config(awaiting_app(settings)))
    finding = asyncio.create_task(found, name="wait for the database")
    serving = asyncio.create_task(server.serve(sockets=[listener.dup()]), name="refuse until then")
    try:
        await asyncio.wait({serving, finding}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        return finding.result() if finding.done() else None
    finally:
        finding.cancel()


def awaiting_app(settings: Settings) -> RequestRim:
    """The application, with the ids, bounds, log lines and counts of every other request."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(DatabaseCollector(lambda: True))
    bounds = BodyBounds(settings.body_bytes_max, settings.body_seconds_max)
    return RequestRim(partial(_answer, registry), body=bounds, upload=bounds, counts=RequestCounts(registry))


async def _answer(registry: CollectorRegistry, scope: Scope, receive: Receive, send: Send) -> None:
    response = _health(registry, scope["path"]) if scope["method"] in {"GET", "HEAD"} else None
    if response is None:
        await _read(receive)
        error = TenancyUnavailable("The database does not answer. Try again soon.", retry_after_s=_RETRY_AFTER_S)
        response = refusal(Request(scope), error)
    response.headers["connection"] = "close"  # the next request may be the service's
    await response(scope, receive, send)


def _health(registry: CollectorRegistry, path: str) -> Response | None:
    match path:
        case "/health/live":
            return _json({"status": "live"}, 200)
        case "/health/ready":
            return _json({"status": "not ready", "reason": "the database does not answer"}, 503)
        case "/metrics":
            return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})
        case _:
            return None


async def _read(receive: Receive) -> None:
    """To its end: a connection that is closed on an unread body takes the answer with it."""
    message: Message = {"more_body": True}
    while message.get("more_body", False):
        message = await receive()


def _json(body: dict[str, str], status: int) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
