"""What happens to every request before a route sees it and after it ended: an id, a bounded body, an access log line,
a count, and the one place where an unforeseen error becomes a 500.

Pure ASGI, so that nothing is paid per chunk of a stream. It never logs a header, a query or a body.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson
import structlog
import uuid_utils
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ApiError, BodyEncoded, BodyTooLarge, BodyTooSlow
from api.refusals import refusal
from api.sent_headers import sent_headers
from gateway.decision import Decision
from gateway.tallies import Count, Counts, Durations, Timings

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Where files come in, which may be larger than other bodies: these paths alone, since a model's name may end alike.
_UPLOADS: Final = re.compile(r"(?:/client/v4/accounts/[^/]+/ai)?/v1/files")
# Workers AI's batches in one body, and their size as its documentation has it.
_QUEUED: Final = b"queueRequest=true"
_QUEUED_BYTES_MAX: Final = 10_000_000
_SECONDS: Final = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

log = structlog.get_logger("api.access")


class RequestCounts:
    """What is counted of every request, by route."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counts(
            "pagegate_http_requests", "Requests answered.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Timings(
            "pagegate_http_request_seconds",
            "From the first byte of a request to the last of its answer.",
            ("route",),
            bounds=_SECONDS,
            registry=registry,
        )
        # Methods, routes and statuses are few.
        self._found: dict[tuple[str, str, int], tuple[Count, Durations]] = {}

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        found = self._found.get((method, route, status))
        if found is None:
            found = (self._requests.of(method, route, str(status)), self._seconds.of(route))
            self._found[method, route, status] = found
        requests, durations = found
        requests.add()
        durations.observe(seconds)


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """How large a body may be, and how long it may take to arrive."""

    bytes_max: int
    seconds_max: float


class RequestRim:
    """The outermost layer around the routes."""

    def __init__(self, app: ASGIApp, *, body: BodyBounds, upload: BodyBounds, counts: RequestCounts) -> None:
        self._app = app
        self._body = body
        self._upload = upload
        self._counts = counts
        self._log = log.bind()  # once: until it is bound, a logger is made anew for each line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = str(uuid_utils.uuid7())
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["received_at_ns"] = time.time_ns()
        status = 0

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_id_headers(state), *_explanation(scope)]
            return send(message)  # handed on unawaited: no second coroutine per chunk

        bounds = self._body
        if _UPLOADS.fullmatch(scope["path"]):
            bounds = self._upload
        elif _QUEUED in scope["query_string"]:
            bounds = BodyBounds(max(_QUEUED_BYTES_MAX, bounds.bytes_max), bounds.seconds_max)
        body = BoundedBody(
            receive,
            bytes_max=bounds.bytes_max,
            seconds_max=bounds.seconds_max,
            arrived=state.get("body_arrived"),
        )
        try:
            refused = _announced_wrong(scope, bounds)
            if refused is None:
                await self._app(scope, body, send_with_id)
            else:
                await refusal(Request(scope), refused)(scope, body, send_with_id)
        except Exception as error:
            log.exception("unforeseen error", request_id=request_id)
            if status:
                raise  # the answer began: all that is left is to break the connection
            await refusal(Request(scope), error)(scope, body, send_with_id)
        finally:
            self._count(scope, state["request_id"], status, time.perf_counter() - started)

    def _count(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._counts.count(method, route, status, seconds)
        self._log.info(
            "request",
            method=method,
            route=route,
            status=status,
            ms=round(seconds * 1000, 1),
            request_id=request_id,
            **_decision(scope),
        )


def _id_headers(state: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    """Of the attempt that is answered: a request that was tried again has another id than it came with."""
    request_id = state["request_id"].encode()
    return [(b"x-request-id", request_id), (b"cf-ai-req-id", request_id)]


def _announced_wrong(scope: Scope, bounds: BodyBounds) -> ApiError | None:
    """What the headers say of a body that will not be read."""
    headers = sent_headers(scope)
    for value in headers.get(b"content-length", ()):
        # More digits than these exceed any limit already.
        if value.isdigit() and int(value[:18]) > bounds.bytes_max:
            return BodyTooLarge(bounds.bytes_max)
    for value in headers.get(b"content-encoding", ()):
        if value.strip().lower() not in {b"", b"identity"}:
            return BodyEncoded()
    return None


def _decision(scope: Scope) -> dict[str, Any]:
    """What is known of how a generating request was admitted; nothing of others."""
    decision: Decision | None = scope["state"].get("decision")
    return {} if decision is None else decision.known()


def _explanation(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The same as a header of the answer, for clients that send `x-pagegate-explain`."""
    if "decision" not in scope["state"] or b"x-pagegate-explain" not in sent_headers(scope):
        return []
    return [(b"x-pagegate-decision", orjson.dumps(_decision(scope)))]


class BoundedBody:
    """A `receive` that refuses a body past its size or its deadline; once the body is in, it only passes through.

    arrived: says without waiting whether all of it is there, if the server can tell: then it needs no timer.
    """

    __slots__ = ("_arrived", "_bytes_left", "_bytes_max", "_complete", "_receive", "_seconds_max", "_until")

    def __init__(
        self, receive: Receive, *, bytes_max: int, seconds_max: float, arrived: Callable[[], bool] | None = None
    ) -> None:
        self._receive = receive
        self._bytes_max = self._bytes_left = bytes_max
        self._seconds_max = seconds_max
        self._until = asyncio.get_running_loop().time() + seconds_max
        self._arrived = arrived
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        if self._arrived is not None and self._arrived():
            message = await self._receive()
        else:
            message = await self._in_time()
        self._complete = not message.get("more_body", False)
        self._bytes_left -= len(message.get("body", b""))
        if self._bytes_left < 0:
            raise BodyTooLarge(self._bytes_max)
        return message

    async def _in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._until):
                return await self._receive()
        except TimeoutError:
            raise BodyTooSlow(self._seconds_max) from None
