"""Server-sent events: sends a token stream, keeps its line alive, and ends it if the client leaves or the engine fails.

Dialects give an iterator of whole frames; this file knows nothing of what is in them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Final

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.departure import ClientGone, ClientWatch
from api.refusals import FORESEEN, stream_error
from gateway.stream import Stream

DONE: Final = b"data: [DONE]\n\n"
_PING: Final = b": ping\n\n"
_LINE_ENDS: Final = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\u2028\u2029\u0085")
# Proxies give up on a silent line after 15 s and more: the longest silence here is half as much again as this.
HEARTBEAT_S: Final = 10.0
# A reader that takes nothing for this long holds pages and a slot for nobody.
STALLED_S: Final = 60.0

log = structlog.get_logger(__name__)


def data_frame(payload: bytes) -> bytes:
    return b"data: %b\n\n" % payload


def one_lined(frame: bytes) -> bytes:
    """The frame with the line ends of Unicode, which JSON leaves as they are, escaped: clients that read lines of text
    (httpx's iter_lines) would end one there. They stand inside JSON's strings alone.
    """
    if b"\xe2\x80" not in frame and b"\xc2\x85" not in frame:
        return frame
    for end, escaped in _LINE_ENDS:
        frame = frame.replace(end, escaped)
    return frame


class EventStream(Response):
    """An answer of frames. Owns the gateway's stream: however this ends, `aclose` is called, and settles what remains.

    A failure after the first byte can't change the status: it becomes one last error frame, without [DONE].
    """

    def __init__(
        self,
        stream: Stream,
        frames: AsyncIterator[bytes],
        *,
        request_id: str,
        headers: Mapping[str, str],
        heartbeat_s: float = HEARTBEAT_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        super().__init__(None, media_type="text/event-stream", headers=headers)
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        del self.headers["content-length"]
        self._stream = stream
        self._frames = frames
        self._request_id = request_id
        self._heartbeat_s = heartbeat_s
        self._stalled_s = stalled_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        line = _Line(send)
        try:
            async with _Heartbeat(receive, line, every_s=self._heartbeat_s, stalled_s=self._stalled_s):
                await line.begin(self.status_code, self.raw_headers)
                await self._relay(line)
        except ClientGone:
            log.info("client left", request_id=self._request_id)
        finally:
            # The gateway settles in a task of its own; the shield keeps a second cancellation from hiding its end.
            await asyncio.shield(self._close())

    async def _relay(self, line: "_Line") -> None:
        try:
            async with aclosing(self._frames) as frames:  # type: ignore[type-var]  # frames come from async generators
                async for frame in frames:
                    await line.write(frame if frame.isascii() else one_lined(frame))
        except FORESEEN as error:
            log.warning("stream failed", request_id=self._request_id, error=type(error).__name__)
            await line.write(stream_error(error, request_id=self._request_id))
        await line.end()

    async def _close(self) -> None:
        """No error of the settlement can be told any more: the answer is out, or nobody listens."""
        try:
            await self._stream.aclose()
        except FORESEEN as error:
            log.exception(
                "a stream's end could not be settled", request_id=self._request_id, error=type(error).__name__
            )


class _Line:
    """The way to the client, and when something last went through it."""

    __slots__ = ("_send", "ended", "moved_at", "writing")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.moved_at = time.monotonic()
        self.writing = True  # nothing may overtake the head
        self.ended = False

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.writing = False

    async def write(self, frame: bytes) -> None:
        self.writing = True
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})
        self.writing = False
        self.moved_at = time.monotonic()

    async def end(self) -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class _Heartbeat(ClientWatch):
    """Watches for departure and, on the same timer, sends a comment into silence and gives up on a stalled reader."""

    def __init__(self, receive: Receive, line: _Line, *, every_s: float, stalled_s: float) -> None:
        super().__init__(receive, every_s=every_s / 2)
        self._line = line
        self._idle_s = every_s
        self._stalled_s = stalled_s

    async def tick(self) -> bool:
        silent_s = time.monotonic() - self._line.moved_at
        if self._line.writing:
            return silent_s < self._stalled_s
        if silent_s >= self._idle_s and not self._line.ended:
            try:
                async with asyncio.timeout(self._stalled_s):
                    await self._line.write(_PING)
            except TimeoutError:
                return False
        return True
