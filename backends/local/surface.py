"""The engine's HTTP surface, which is SGLang's. wiring.py builds its parts and serves it.

The event loop parses, tokenises in a thread, frames and sends; the worker's thread computes. Only this file of the
engine knows HTTP.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from backends.local import reports
from backends.local.embeddings import Embedder, EmbeddingBody
from backends.local.engine import Engine
from backends.local.errors import (
    BodyTooLargeError,
    EngineError,
    GivenUpError,
    InvalidRequestError,
)
from backends.local.intake import Intake
from backends.local.live import Delivery, LiveRequests, Mailbox
from backends.local.pair.fetch import Fetches
from backends.local.pair.offer import Rooms
from backends.local.replies import (
    DONE,
    ChatShape,
    CompletionShape,
    Reply,
    ReplyShape,
    ToolShape,
    error_body,
    error_event,
)
from backends.local.schemas import AbortBody, ChatBody, CompletionBody, MemoryBody
from backends.local.settings import Role
from backends.local.tokenizer import Tokenizer
from backends.local.worker import Worker

BODY_BYTES_MAX = 16 << 20
"""A prompt of the longest context is under a megabyte; this leaves room for any encoding of it."""
STOP_SECONDS_MAX = 5.0


class Loader(Protocol):
    """Makes engines; see loading.py."""

    @property
    def seconds(self) -> Mapping[str, float]: ...

    def begin(self, before: Mapping[str, float]) -> None: ...

    def load(self) -> Engine: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes need."""

    identity: reports.Identity
    loader: Loader
    tokenizer: Tokenizer
    worker: Worker
    live: LiveRequests
    intake: Intake
    metrics: reports.EngineMetrics
    pair: Rooms | Fetches | None
    """Of a half of a pair: how it finds the other one."""
    embedder: Embedder | None = None


B = TypeVar("B", bound=BaseModel)
Endpoint = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content)


def create_app(parts: Parts) -> Starlette:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        parts.worker.start()
        yield
        await asyncio.to_thread(parts.worker.stop, STOP_SECONDS_MAX)
        if parts.embedder is not None:
            parts.embedder.close()

    routes = [
        *_generation_routes(parts),
        *_memory_routes(parts.worker),
        *_health_routes(parts),
        *_report_routes(parts),
        *([] if parts.embedder is None else _embedding_routes(parts.embedder)),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={EngineError: _refuse})


def _get(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["GET"])


def _post(path: str, endpoint: Endpoint) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _generation_routes(parts: Parts) -> list[Route]:
    async def chat(request: Request) -> Response:
        body = await _parse(request, ChatBody)
        shape = ToolShape if body.calls_tools else ChatShape
        return await _answer(parts, request, body, shape(parts.tokenizer))

    async def complete(request: Request) -> Response:
        body = await _parse(request, CompletionBody)
        return await _answer(parts, request, body, CompletionShape(parts.tokenizer))

    async def abort(request: Request) -> Response:
        body = await _parse(request, AbortBody)
        parts.worker.abort_prefix("" if body.abort_all else body.rid)
        return Response(status_code=200)

    return [_post("/v1/chat/completions", chat), _post("/v1/completions", complete), _post("/abort_request", abort)]


def _memory_routes(worker: Worker) -> list[Route]:
    """Release and resume end when it is done, and are done at once where it is so already."""

    async def release(request: Request) -> Response:
        await _parse(request, MemoryBody)
        await asyncio.wrap_future(worker.release())
        return Response(status_code=200)

    async def resume(request: Request) -> Response:
        await _parse(request, MemoryBody)
        await asyncio.wrap_future(worker.resume())
        return Response(status_code=200)

    async def flush_cache(_: Request) -> Response:
        worker.flush_cache()
        return Response(status_code=200)

    return [
        _post("/release_memory_occupation", release),
        _post("/resume_memory_occupation", resume),
        _post("/flush_cache", flush_cache),
    ]


def _embedding_routes(embedder: Embedder) -> list[Route]:
    async def embed(request: Request) -> Response:
        return JsonResponse(await embedder.answer(await _parse(request, EmbeddingBody)))

    return [_post("/v1/embeddings", embed)]


def _health_routes(parts: Parts) -> list[Route]:
    async def health(_: Request) -> Response:
        # So many pages changed hands wrongly that the book-keeping can't be trusted: a supervisor should restart it.
        return Response(status_code=503 if parts.worker.report.tags.overflowing else 200)

    async def health_generate(_: Request) -> Response:
        if parts.identity.settings.role is not Role.UNIFIED:
            # Half of a pair generates nothing by itself.
            return Response(status_code=200 if parts.worker.ready else 503)
        body = ChatBody(input_ids=[0], max_tokens=1, temperature=0.0)
        mailbox = await parts.intake.accept(body)
        while (await mailbox.take()).finish is None:
            pass
        return Response(status_code=200)

    async def ready(_: Request) -> Response:
        parts.worker.must_be_ready()
        return JsonResponse({"status": "ready"})

    return [_get("/health", health), _get("/health_generate", health_generate), _get("/ready", ready)]


def _report_routes(parts: Parts) -> list[Route]:
    identity = parts.identity

    async def loads(_: Request) -> Response:
        return JsonResponse(reports.loads(identity, parts.worker.report, parts.live))

    async def metrics(_: Request) -> Response:
        return Response(parts.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def server_info(_: Request) -> Response:
        return JsonResponse(reports.server_info(identity, parts.worker.report, parts.loader.seconds))

    async def model_info(_: Request) -> Response:
        return JsonResponse(reports.model_info(identity))

    async def models(_: Request) -> Response:
        return JsonResponse(reports.models(identity))

    return [
        _get("/v1/loads", loads),
        _get("/metrics", metrics),
        _get("/server_info", server_info),
        _get("/get_server_info", server_info),
        _get("/model_info", model_info),
        _get("/v1/models", models),
    ]


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return JsonResponse(error_body(str(error), kind=error.kind, status=error.status), status_code=error.status)


async def _parse(request: Request, kind: type[B]) -> B:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > BODY_BYTES_MAX:
            raise BodyTooLargeError(f"The body is larger than {BODY_BYTES_MAX} bytes.")
    try:
        return kind.model_validate(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"The body is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise InvalidRequestError(f"{where}: {first['msg']}" if where else first["msg"]) from error


async def _answer(parts: Parts, request: Request, body: ChatBody | CompletionBody, shape: ReplyShape) -> Response:
    mailbox = await parts.intake.accept(body)
    reply = Reply(
        rid=mailbox.rid,
        model=body.model or parts.identity.name,
        created=int(time.time()),
        shape=shape,
        with_logprobs=body.wanted_logprobs is not None,
    )
    if body.stream:
        return EventSourceResponse(_stream(parts, mailbox, reply, body), sep="\n")
    return await _whole(parts, request, mailbox, reply)


async def _stream(
    parts: Parts, mailbox: Mailbox, reply: Reply, body: ChatBody | CompletionBody
) -> AsyncIterator[bytes]:
    """The events of one answer. A client that goes away cancels this, and its request with it."""
    delivery = Delivery()
    opening = reply.opening()
    try:
        while delivery.finish is None:
            delivery = await mailbox.take()
            if opening is not None:
                yield _event(opening)
                opening = None
            if delivery.text or delivery.logprobs:
                for chunk in reply.content(delivery, with_usage=body.continuous_usage):
                    yield _event(chunk)
        if delivery.finish.failure is not None:
            yield _event(error_event(delivery.finish.failure))
            yield _event(DONE)
            return
        for chunk in reply.finish(delivery):
            yield _event(chunk)
        if body.include_usage:
            yield _event(reply.usage(delivery))
        yield _event(DONE)
    finally:
        if delivery.finish is None:
            parts.worker.abort(mailbox.rid)


async def _whole(parts: Parts, request: Request, mailbox: Mailbox, reply: Reply) -> Response:
    collecting = asyncio.create_task(_collect(mailbox), name=f"collect-{mailbox.rid}")
    leaving = asyncio.create_task(_left(request), name=f"watch-{mailbox.rid}")
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            # Nobody reads the answer any more, so what is returned here does not matter; the abort does.
            return Response(status_code=499)
        whole = collecting.result()
        if whole.finish is not None and whole.finish.failure is not None:
            failure = whole.finish.failure
            raise GivenUpError(failure.message, status=failure.status, kind=failure.kind)
        return JsonResponse(reply.whole(whole))
    finally:
        if not collecting.done():
            parts.worker.abort(mailbox.rid)
        collecting.cancel()
        leaving.cancel()


async def _collect(mailbox: Mailbox) -> Delivery:
    whole = Delivery()
    while whole.finish is None:
        delivery = await mailbox.take()
        delivery.text = whole.text + delivery.text
        delivery.logprobs = whole.logprobs + delivery.logprobs
        whole = delivery
    return whole


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
