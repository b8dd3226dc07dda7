"""The one engine client: SGLang's HTTP surface, whichever engine serves it.

Used by the gateway. Knows no accounts and no money; retries nothing (the pipeline decides that). aiohttp, because it
costs a fraction of other clients' CPU; connections are kept alive for less long than an engine's server keeps them.
"""

import asyncio
from collections import deque
from contextlib import suppress
from io import BytesIO
from typing import Any

import aiohttp
import orjson

from backends.errors import EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable
from backends.settings import BackendSettings
from backends.wire import DONE, Chunk, Loads, ServerInfo, read_chunk, read_loads, read_server_info

# An SSE event longer than this is no event of an engine we know (logprobs of 20 alternatives need some 4 KiB).
EVENT_BYTES_MAX = 4 << 20
# uvicorn, which serves SGLang, closes an idle connection after 5 s: ours are given up before.
_KEEPALIVE_S = 4.0
_WHOLE_BODY_BYTES_MAX = 1 << 20
_REFUSAL_BODY_S = 2.0
_JSON = {"Content-Type": "application/json"}


def open_session() -> aiohttp.ClientSession:
    """A session for all engines of one process; the caller closes it. Concurrency is bounded by admission, not here."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=30)
    return aiohttp.ClientSession(
        connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )


class EngineStream:
    """An engine's answer as it comes: iterate over chunks until it ends; `close` drops the connection.

    An iteration that is cancelled loses nothing: the next one goes on where it stopped, so that after an abort the rest
    of the answer, with the engine's last word on usage, can still be read by somebody else.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content
        self._partial = b""
        self._chunks: deque[Chunk] = deque()
        self._ended = False
        self._failure: EngineBroke | None = None  # raised once what came before it has been handed out

    def __aiter__(self) -> "EngineStream":
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopAsyncIteration
            await self._read_more()
        return self._chunks.popleft()

    async def _read_more(self) -> None:
        try:
            data = await self._content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineBroke(f"the engine's stream broke: {type(error).__name__}") from error
        except TimeoutError as error:
            raise EngineTimeout("the engine's stream went silent") from error
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
            except EngineBroke as error:
                self._failure = error
                return

    def close(self) -> None:
        """Drop the connection. Idempotent; a stream that ended keeps its connection for the next call."""
        self._response.release() if self._response.content.at_eof() else self._response.close()


class EngineClient:
    """One engine. Every method raises the BackendError family; nothing else about the network leaves this file."""

    def __init__(self, url: str, session: aiohttp.ClientSession, settings: BackendSettings) -> None:
        self.url = url.rstrip("/")
        self._session = session
        connect = settings.connect_timeout_s
        self._answer = aiohttp.ClientTimeout(total=settings.answer_s_max, sock_connect=connect)
        self._stream = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=settings.silence_s_max)
        self._quick = aiohttp.ClientTimeout(total=connect)

    async def generate(self, path: str, body: bytes) -> dict[str, Any]:
        """POST a call that is not streamed; the parsed answer."""
        raw = await self._exchange("POST", path, body, self._answer)
        return _parse(raw)

    async def open_stream(self, path: str, body: bytes) -> EngineStream:
        """POST a streamed call; returns once the engine has accepted it. The caller closes the stream."""
        try:
            response = await self._session.post(
                self.url + path, data=_sendable(body), headers=_JSON, timeout=self._stream
            )
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnreachable(f"no answer from the engine: {type(error).__name__}") from error
        except TimeoutError as error:
            raise EngineTimeout("the engine did not answer") from error
        if response.status != 200:
            try:
                raise await _refusal(response)
            finally:
                response.close()
        return EngineStream(response)

    async def abort(self, rid: str) -> None:
        """Stop every call whose rid starts with `rid` (the engine matches by prefix)."""
        await self._exchange("POST", "/abort_request", orjson.dumps({"rid": rid}), self._quick)

    async def ready(self) -> None:
        """Raises EngineRefused while the engine loads its model: its reports may answer before it can generate."""
        await self._exchange("GET", "/ready", None, self._quick)

    async def loads(self) -> Loads:
        return read_loads(_parse(await self._exchange("GET", "/v1/loads?include=core,queues", None, self._quick)))

    async def server_info(self) -> ServerInfo:
        return read_server_info(_parse(await self._exchange("GET", "/server_info", None, self._quick)))

    async def _exchange(self, method: str, path: str, body: bytes | None, bound: aiohttp.ClientTimeout) -> bytes:
        try:
            async with self._session.request(
                method, self.url + path, data=_sendable(body), headers=_JSON if body else None, timeout=bound
            ) as response:
                if response.status != 200:
                    raise await _refusal(response)
                return await response.read()
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
            raise EngineUnreachable(f"the engine dropped the connection: {type(error).__name__}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnreachable(f"no answer from the engine: {type(error).__name__}") from error
        except TimeoutError as error:
            raise EngineTimeout(f"the engine did not answer {path} in time") from error


def _sendable(body: bytes | None) -> bytes | BytesIO | None:
    """A large body goes out in pieces, from a file: in one piece it would block the loop (aiohttp warns of it)."""
    return BytesIO(body) if body is not None and len(body) > _WHOLE_BODY_BYTES_MAX else body


async def _refusal(response: aiohttp.ClientResponse) -> EngineRefused:
    """The engine's own words go to the log only; if they don't come, the status says enough."""
    text = "(no body)"
    with suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
        async with asyncio.timeout(_REFUSAL_BODY_S):
            text = (await response.content.read(4096)).decode(errors="replace")
    return EngineRefused(f"the engine answered {response.status}: {text}", status=response.status)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineBroke("the engine's answer is not JSON") from error
    if not isinstance(fields, dict):
        raise EngineBroke("the engine's answer is not a JSON object")
    return fields
