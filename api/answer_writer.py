"""How an answer's bytes reach the connection: head and body of a whole one in a single write.

Used by http_protocol.py in place of uvicorn's own `send`, which writes them apart: one more call into the system, and
one more packet for the client to wake up for. Streams and everything out of the ordinary are left to that one.
"""

import re
from collections.abc import Coroutine
from functools import lru_cache
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

# Nobody may write lines of a head by way of a name or a value: what holds anything else is left to uvicorn to refuse.
_NAME: Final = re.compile(rb"[a-z0-9!#$%&'*+.^_`|~-]+")
_TEXT: Final = bytes({0x09, *range(0x20, 0x7F), *range(0x80, 0x100)})
# A larger body is not copied to save a write.
_TOGETHER_BYTES_MAX: Final = 1 << 20
# These say how the body ends or what becomes of the connection.
_NOT_OURS: Final = frozenset({b"connection", b"transfer-encoding"})
_WITHOUT_BODY: Final = frozenset({204, 304})


class AnswerWriter(RequestResponseCycle):
    """uvicorn's exchange of one request; an instance becomes one of these before anything has been sent."""

    _start: Any = None  # told and not yet written: it waits for its body

    def send(self, message: Any) -> Coroutine[Any, Any, None]:
        """As uvicorn's, whose own is handed on unawaited: no second coroutine for each chunk of a stream."""
        if self._start is not None:
            if message["type"] == "http.response.body":
                return self._send_both(message)
            self._start = None  # nothing of it was written, and uvicorn says in its place that the application failed
        if not self.response_started and b"content-length" in [name for name, _ in message.get("headers", ())]:
            return self._wait_with(message)
        return super().send(message)

    async def _wait_with(self, start: Any) -> None:
        self._start = start

    async def _send_both(self, message: Any) -> None:
        start, self._start = self._start, None
        whole = None if message.get("more_body", False) else self._whole(start, message.get("body", b""))
        if whole is None:
            await super().send(start)
            await super().send(message)
        else:
            await self._write(whole)

    def _whole(self, start: dict[str, Any], body: bytes) -> bytes | None:
        """Head and body; None if uvicorn is to look at them."""
        bodiless = self.scope["method"] == "HEAD" or start["status"] in _WITHOUT_BODY
        if not self.keep_alive or bodiless or len(body) > _TOGETHER_BYTES_MAX:
            return None
        headers = [*self.default_headers, *start["headers"]]
        lines = b"\r\n".join(map(b": ".join, headers))
        plain = lines.translate(None, _TEXT) == b"\r\n" * (len(headers) - 1) and all(map(_is_plain, dict(headers)))
        if not plain or (b"content-length", b"%d" % len(body)) not in headers:
            return None
        return b"%b%b\r\n\r\n%b" % (STATUS_LINE[start["status"]], lines, body)

    async def _write(self, whole: bytes) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        self.waiting_for_100_continue = False
        self.response_started = self.response_complete = True
        self.transport.write(whole)
        self.message_event.set()
        self.on_response()


@lru_cache(256)  # the same few on every answer
def _is_plain(name: bytes) -> bool:
    return _NAME.fullmatch(name) is not None and name not in _NOT_OURS
