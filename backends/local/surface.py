"""The engine's HTTP surface, which is SGLang's. `server.py`, the process, serves it.

The event loop parses, tokenises in a thread, frames and sends; the worker's thread computes. Only this file of the
engine knows HTTP.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson
import structlog
import torch
import uvicorn
import uvloop
from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from backends.local import reports
from backends.local.embeddings import Embedder, EmbeddingBody
from backends.local.engine import Engine, Event, PagesReady, TokenEvent, page_bytes, pool_pages
from backends.local.errors import (
    BodyTooLargeError,
    EngineError,
    GivenUpError,
    InvalidRequestError,
    StartError,
)
from backends.local.guide import Guides
from backends.local.intake import Intake, Limits
from backends.local.kv.pool import FP8, stored_dtype
from backends.local.kv.transport import layout
from backends.local.live import Delivery, LiveRequests, Mailbox
from backends.local.models.llama import LlamaConfig
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
from backends.local.settings import EngineSettings, Role
from backends.local.tokenizer import Tokenizer
from backends.local.worker import Worker

log = structlog.get_logger(__name__)

BODY_BYTES_MAX = 16 << 20
"""A prompt of the longest context is under a megabyte; this leaves room for any encoding of it."""
STOP_SECONDS_MAX = 5.0
TOKENIZER_THREADS = 2


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


def build_parts(
    settings: EngineSettings, loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor, loader: Loader
) -> Parts:
    """Everything but the weights, which the worker reads in its own thread."""
    config = LlamaConfig.read(settings.model_path)
    tokenizer = Tokenizer(settings.model_path)
    pages = pool_pages(config, settings)
    limits = Limits(
        context_tokens=min(settings.context_length or config.context, config.context),
        pool_tokens=pages * settings.page_size,
        vocabulary=config.vocabulary,
        queued_requests=settings.max_queued_requests,
        heeds_priorities=settings.enable_priority_scheduling,
        role=settings.role,
    )
    identity = reports.Identity(
        settings=settings,
        limits=limits,
        kv_cache_dtype=_kv_name(stored_dtype(settings.kv_cache_dtype, config.dtype)),
        kv_cache_bytes=pages * page_bytes(config, settings),
        started_at=int(time.time()),
    )
    live = LiveRequests()
    guides = Guides(settings.model_path / "tokenizer.json", config.vocabulary, sorted(tokenizer.stop_token_ids))

    def receive(events: list[Event]) -> None:
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        metrics.observe(tokens)
        live.dispatch(tokens)
        if pair is not None:
            _tell(pair, events)
        for event in tokens:
            if event.finish is not None:
                _log_end(event)

    def deliver(events: list[Event]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(receive, events)

    worker = Worker(loader.load, deliver=deliver, fail=_die, clock=time.time)
    pair = _pair(settings, config, size_max=identity.kv_cache_bytes)
    if pair is not None:
        pair.attach(worker)
    intake = Intake(
        limits=limits,
        tokenizer=tokenizer,
        guides=guides,
        worker=worker,
        live=live,
        executor=executor,
        clock=time.monotonic,
        rooms=pair if isinstance(pair, Rooms) else None,
    )
    metrics = reports.EngineMetrics(identity, lambda: worker.report, live)
    encoder = settings.embedding_model_path
    embedder = None if encoder is None else Embedder(encoder, settings.embedding_model_name)
    return Parts(identity, loader, tokenizer, worker, live, intake, metrics, pair, embedder)


def _pair(settings: EngineSettings, config: LlamaConfig, *, size_max: int) -> Rooms | Fetches | None:
    shape = layout(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        page_size=settings.page_size,
        stored=stored_dtype(settings.kv_cache_dtype, config.dtype),
    )
    match settings.role:
        case Role.PREFILL:
            return Rooms(shape)
        case Role.DECODE:
            return Fetches(shape, size_max=size_max)
        case Role.UNIFIED:
            return None


def _tell(pair: Rooms | Fetches, events: list[Event]) -> None:
    """What the worker did, to the half that the other process talks to."""
    for event in events:
        if isinstance(event, TokenEvent):
            if event.finish is not None:
                pair.ended(event.rid)
        elif isinstance(event, PagesReady):
            assert isinstance(pair, Rooms)
            pair.hand_in(event.rid, event.handover)
        else:
            assert isinstance(pair, Fetches)
            assert event.sequence.bootstrap is not None
            pair.start(event.sequence.rid, event.sequence.bootstrap, event.sequence.tokens)


@asynccontextmanager
async def _open_to_the_other_half(parts: Parts) -> AsyncIterator[None]:
    """Listen where the pages are handed over, if this process does that."""
    settings = parts.identity.settings
    host, port = settings.disaggregation_bootstrap_host or settings.host, settings.disaggregation_bootstrap_port
    server = None
    if isinstance(parts.pair, Rooms):
        try:
            server = await parts.pair.listen(host, port)
        except OSError as error:
            raise StartError(f"Can't hand pages over at {host}, port {port}: {error.strerror or error}.") from error
    try:
        yield
    finally:
        if server is not None:
            server.close()
        if parts.pair is not None:
            await parts.pair.close()


def _kv_name(stored: torch.dtype) -> str:
    """As SGLang names what it stores."""
    return "fp8_e4m3" if stored == FP8 else str(stored).removeprefix("torch.")


def _log_end(event: TokenEvent) -> None:
    assert event.finish is not None
    log.info(
        "request_ended",
        rid=event.rid,
        reason=event.finish.reason.value,
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        cached_tokens=event.cached_tokens,
    )


def _die() -> None:
    """End the process at once: the worker can't go on, and a supervisor restarts what has ended."""
    sys.stderr.flush()
    os._exit(1)


async def _serve(settings: EngineSettings, loader: Loader) -> None:
    with ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer") as executor:
        parts = build_parts(settings, asyncio.get_running_loop(), executor, loader)
        config = uvicorn.Config(
            create_app(parts),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=int(STOP_SECONDS_MAX),
        )
        log.info("engine_starting", model=settings.served_model_name, port=settings.port)
        async with _open_to_the_other_half(parts):
            await uvicorn.Server(config).serve()


def run(settings: EngineSettings, loader: Loader) -> None:
    """Serve until the process is told to end. Raises StartError."""
    uvloop.run(_serve(settings, loader))
