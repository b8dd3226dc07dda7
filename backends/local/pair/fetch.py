"""Decode's side: a connection for each request to where its prompt's pages are computed, until they have come.

wiring.py starts it when the worker has pages for the prompt. Lives on the event loop.
"""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import structlog
from pydantic import ValidationError

from backends.local.pair.frames import (
    LINE_BYTES_MAX,
    SILENCE_S_MAX,
    HandoverBroke,
    read_data,
    read_line,
    write_line,
)
from backends.local.pair.handover import PREFILL_LOST, Handover, Header, Hello, digest
from backends.local.sequence import Bootstrap, Failure

log = structlog.get_logger(__name__)


class Decoding(Protocol):
    """What is asked of the worker."""

    def receive(self, rid: str, handover: Handover) -> None:
        """Its pages have come."""

    def fail(self, rid: str, failure: Failure) -> None:
        """End it; without effect once it has ended."""


class Fetches:
    """One task a request that waits for pages. size_max: bytes of the largest prompt's pages."""

    def __init__(self, layout: str, *, size_max: int) -> None:
        self._layout = layout
        self._size_max = size_max
        self._worker: Decoding | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def attach(self, worker: Decoding) -> None:
        """The worker whose requests these are."""
        self._worker = worker

    def start(self, rid: str, bootstrap: Bootstrap, prompt: Sequence[int]) -> None:
        task = asyncio.create_task(self._fetch(rid, bootstrap, digest(prompt)), name=f"fetch {rid}")
        self._tasks[rid] = task

    def ended(self, rid: str) -> None:
        """The request has ended; who computes for it is left, and notices. Idempotent."""
        task = self._tasks.pop(rid, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, rid: str, bootstrap: Bootstrap, prompt_digest: str) -> None:
        assert self._worker is not None
        hello = Hello(room=bootstrap.room, fence=secrets.token_hex(8), prompt_digest=prompt_digest, layout=self._layout)
        try:
            reader, writer = await _connect(bootstrap)
            try:
                handover = await self._take(hello, reader, writer)
                await write_line(writer, received=True)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        except HandoverBroke as error:
            log.warning("no_pages_came", rid=rid, reason=str(error))
            self._worker.fail(rid, PREFILL_LOST)
            return
        self._worker.receive(rid, handover)

    async def _take(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Handover:
        await write_line(writer, hello=hello.model_dump())
        while "alive" in (said := await read_line(reader)):
            pass
        if "header" not in said:
            raise HandoverBroke(f"prefill refused: {said.get('refused')!r:.200}")
        try:
            header = Header.model_validate(said["header"])
        except ValidationError as error:
            raise HandoverBroke("prefill's header can't be read") from error
        if header.fence != hello.fence or not 0 < header.size <= self._size_max:
            raise HandoverBroke("prefill answers another question")
        return Handover.of(header, await read_data(reader, header.size))


async def _connect(bootstrap: Bootstrap) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(SILENCE_S_MAX):
            if bootstrap.host.startswith("unix:"):
                path = bootstrap.host.removeprefix("unix:")
                return await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
            return await asyncio.open_connection(bootstrap.host, bootstrap.port, limit=LINE_BYTES_MAX)
    except (OSError, TimeoutError) as error:
        raise HandoverBroke(f"prefill can't be reached: {type(error).__name__}") from error
