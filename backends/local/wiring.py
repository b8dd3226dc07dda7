"""The composition root of an engine process: settings and a loader of weights in, the surface served until it ends.

Called by `server.py`. The event loop serves; what the worker's thread tells is handed to the loop here.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import structlog
import torch
import uvicorn
import uvloop

from backends.local import reports
from backends.local.embeddings import Embedder
from backends.local.engine import Event, PagesReady, TokenEvent, page_bytes, pool_pages
from backends.local.errors import (
    StartError,
)
from backends.local.guide import Guides
from backends.local.intake import Intake, Limits
from backends.local.kv.pool import FP8, stored_dtype
from backends.local.kv.transport import layout
from backends.local.live import LiveRequests
from backends.local.models.llama import LlamaConfig
from backends.local.pair.fetch import Fetches
from backends.local.pair.offer import Rooms
from backends.local.settings import EngineSettings, Role
from backends.local.surface import STOP_SECONDS_MAX, Loader, Parts, create_app
from backends.local.tokenizer import Tokenizer
from backends.local.worker import Worker

log = structlog.get_logger(__name__)

TOKENIZER_THREADS = 2


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
