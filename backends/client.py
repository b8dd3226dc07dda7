"""The one engine client: SGLang's HTTP surface, whichever engine serves it.

Used by the gateway. Knows no accounts and no money; retries nothing (the pipeline decides that). How bytes travel is
connections.py's.
"""

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

import orjson

from backends.connections import Connection, EngineSession, post
from backends.engine_figures import EngineFigures, read_figures
from backends.errors import BackendError, EngineBroke, EngineIntegrityAbort, EngineRefused, EngineUnreachable
from backends.page_tags import ABORT_MESSAGE, ABORT_STATUS
from backends.settings import BackendSettings
from backends.wire import (
    DONE,
    Chunk,
    Loads,
    ServerInfo,
    is_busy,
    read_chunk,
    read_loads,
    read_server_info,
    read_start_parts,
)

# An SSE event longer than this is no event of an engine we know (logprobs of 20 alternatives need some 4 KiB).
EVENT_BYTES_MAX = 4 << 20
_REFUSAL_BYTES_MAX = 4096
_REFUSAL_BODY_S = 2.0
_BUSY_STATUS = 429
_NOT_FOUND_STATUS = 404
_CONFLICT_STATUS = 409


class EngineAnswer:
    """A call that is not streamed. `fields` may be cancelled and asked for again; `close` drops what is not there."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._closed = False

    async def fields(self) -> dict[str, Any]:
        """The parsed answer."""
        try:
            status, body = await self._connection.whole()
        except EngineBroke as error:  # nobody has seen a part of it
            raise EngineUnreachable(error.message) from error
        if status != 200:
            raise _refusal(status, body)
        return _parse(body)

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._connection.release()


class EngineStream:
    """An engine's answer as it comes: iterate over chunks until it ends; `close` drops the connection.

    An iteration that is cancelled loses nothing: the next one goes on where it stopped, so that after an abort the rest
    of the answer, with the engine's last word on usage, can still be read by somebody else.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._closed = False
        self._partial = b""
        self._chunks: deque[Chunk] = deque()
        self._ended = False
        self._failure: EngineBroke | EngineIntegrityAbort | None = (
            None  # raised once what came before it has been handed out
        )

    def __aiter__(self) -> "EngineStream":
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopAsyncIteration
            self._take(await self._connection.read())
        return self._chunks.popleft()

    def _take(self, data: bytes) -> None:
        """data: what has come; empty at the end."""
        if not data:
            self._ended = True
            return
        *events, self._partial = (self._partial + data).split(b"\n\n")
        if len(self._partial) > EVENT_BYTES_MAX:
            raise EngineBroke(f"the engine sent an event of more than {EVENT_BYTES_MAX} bytes")
        for event in events:
            if not event.startswith(b"data:"):
                continue  # a comment: a heartbeat of the engine's
            payload = event[5:].strip()
            if payload == DONE:
                self._ended = True
                return
            try:
                self._chunks.append(read_chunk(payload))
            except (EngineBroke, EngineIntegrityAbort) as error:
                self._failure = error
                return

    def close(self) -> None:
        """Drop the connection; a stream that has ended gives it up for the next call. Idempotent."""
        if not self._closed:
            self._closed = True
            self._connection.release(ended=self._ended)


class EngineClient:
    """One engine. Every method raises the BackendError family; nothing else about the network leaves this package."""

    def __init__(self, url: str, session: EngineSession, settings: BackendSettings) -> None:
        self.url = url.rstrip("/")
        self._pool = session.pool(url)
        self._settings = settings
        self._heads: dict[str, bytes] = {}  # by path: a handful

    async def ask(self, path: str, body: bytes, *, brief: bool = False) -> EngineAnswer:
        """POST a call that is not streamed; returns once it is sent. The caller closes the answer.

        brief: nothing is generated, so that the bound on silence is a bound on the answer.
        """
        connection = await self._pool.connection(within_s=self._settings.connect_timeout_s)
        bound_s = self._settings.silence_s_max if brief else self._settings.answer_s_max
        connection.send(post(self._head(path), body), whole=True, within_s=bound_s)
        return EngineAnswer(connection)

    async def open_stream(self, path: str, body: bytes) -> EngineStream:
        """POST a streamed call; returns once the engine has accepted it. The caller closes the stream."""
        connection = await self._pool.connection(within_s=self._settings.connect_timeout_s)
        accepted = False
        try:
            connection.send(post(self._head(path), body), whole=False, within_s=self._settings.silence_s_max)
            status = await connection.head()
            accepted = status == 200
            if not accepted:
                raise _refusal(status, await _beginning(connection))
            return EngineStream(connection)
        finally:
            if not accepted:
                connection.release()

    def still_for(self, seconds: float) -> None:
        """By its reports the engine has done nothing for so long. Past the bound on silence, whole answers that have
        been waited for as long fail, as a silent stream does.
        """
        if seconds >= self._settings.silence_s_max:
            self._pool.give_up(older_s=self._settings.silence_s_max)

    async def keep_spare(self, count: int) -> None:
        """Make connections ahead, where making one takes as long as asking."""
        await self._pool.keep_spare(count, within_s=self._settings.connect_timeout_s)

    def abandon_unanswered(self) -> None:
        """Calls that nothing has been heard of fail as those of an engine that can't be reached; others go on."""
        self._pool.abandon_unanswered()

    async def abort(self, rid: str) -> None:
        """Stop every call whose rid starts with `rid` (the engine matches by prefix)."""
        await self._exchange("POST", "/abort_request", orjson.dumps({"rid": rid}))

    async def ready(self) -> None:
        """Raises EngineRefused while the engine loads its model: its reports may answer before it can generate.

        SGLang before 0.5.23 has no route for it alone; its /health may run a generation of one token besides.
        """
        try:
            await self._exchange("GET", "/ready")
        except EngineRefused as error:
            if error.status != _NOT_FOUND_STATUS:
                raise
            await self._exchange("GET", "/health")

    async def release(self, *, within_s: float) -> None:
        """Let it give up the memory of weights and KV pages. Done at once where it is so already.

        Raises EngineRefused (409) if anything runs or waits there. It is asked first: SGLang does not refuse then, its
        scheduler fails an assertion and the whole server ends.
        """
        if is_busy(_parse(await self._exchange("GET", "/v1/loads?include=core,queues"))):
            raise EngineRefused("requests run or wait there", status=_CONFLICT_STATUS)
        await self._exchange("POST", "/release_memory_occupation", b"{}", within_s=within_s)

    async def resume(self, *, within_s: float) -> None:
        """Let it take that memory back; returns when it serves again. Only after a release: SGLang ends otherwise."""
        await self._exchange("POST", "/resume_memory_occupation", b"{}", within_s=within_s)

    async def loads(self, rank: int | None = None) -> Loads:
        """rank: of data parallelism; None: the engine has one."""
        path = "/v1/loads?include=core,queues" + ("" if rank is None else f"&dp_rank={rank}")
        return read_loads(_parse(await self._exchange("GET", path)), rank)

    async def server_info(self) -> ServerInfo:
        return read_server_info(_parse(await self._exchange("GET", "/server_info")))

    async def start_parts(self) -> dict[str, float]:
        """Seconds of its latest start or resume, by part; empty from an engine that doesn't say them."""
        return read_start_parts(_parse(await self._exchange("GET", "/server_info")))

    async def figures(self, rank: int | None = None) -> EngineFigures:
        """rank: as for loads."""
        return read_figures((await self._exchange("GET", "/metrics")).decode(errors="replace"), rank)

    async def _exchange(
        self, method: str, path: str, body: bytes | None = None, *, within_s: float | None = None
    ) -> bytes:
        """within_s: for the answer; None: what a report may take."""
        bound_s = self._settings.connect_timeout_s
        request = self._pool.request(method, path, body)
        status, answer = await self._pool.exchange(request, within_s=within_s or bound_s, connect_s=bound_s)
        if status != 200:
            raise _refusal(status, answer)
        return answer

    def _head(self, path: str) -> bytes:
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = self._pool.head("POST", path)
        return head


async def _beginning(connection: Connection) -> bytes:
    """Of a refusal's body, as much as a log line takes; if it doesn't come, the status says enough."""
    body = b""
    with suppress(BackendError, TimeoutError):
        async with asyncio.timeout(_REFUSAL_BODY_S):
            while len(body) < _REFUSAL_BYTES_MAX and (piece := await connection.read()):
                body += piece
    return body


def _refusal(status: int, body: bytes) -> EngineRefused | EngineIntegrityAbort:
    """The engine's own words go to the log only; not those about a request, which may repeat what was in it."""
    text = body[:_REFUSAL_BYTES_MAX].decode(errors="replace") or "(no body)"
    if status == ABORT_STATUS and ABORT_MESSAGE in text:
        return EngineIntegrityAbort(ABORT_MESSAGE)
    if 400 <= status < 500 and status != _BUSY_STATUS:
        return EngineRefused(f"the engine answered {status}", status=status)
    return EngineRefused(f"the engine answered {status}: {text}", status=status)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineBroke("the engine's answer is not JSON") from error
    if not isinstance(fields, dict):
        raise EngineBroke("the engine's answer is not a JSON object")
    return fields
