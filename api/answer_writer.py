"""How an answer's bytes reach the connection: a whole one in a single write, a stream's chunks without a detour.

Used by http_protocol.py in place of uvicorn's own `send` for what makes up nearly all traffic; that one looks at each
header line by itself and writes head and body apart. Everything out of the ordinary is left to it.
"""

import re
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

# Nobody may write lines of a head by way of a name or a value: uvicorn refuses these, and is asked to.
_NOT_IN_NAMES: Final = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"A-Z]')
_NOT_IN_VALUES: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# These say how the body ends or what becomes of the connection.
_LEFT_TO_UVICORN: Final = frozenset({b"connection", b"transfer-encoding"})
_NO_BODY: Final = frozenset({204, 304})


class AnswerWriter(RequestResponseCycle):
    """uvicorn's exchange of one request; an instance becomes one of these before anything has been sent."""

    _start: Any = None  # told and not yet written: it waits for its body

    async def send(self, message: Any) -> None:
        """As uvicorn's. A head that says its body's length goes out with that body."""
        if message["type"] == "http.response.start":
            if not self.response_started and b"content-length" in [name for name, _ in message["headers"]]:
                self._start = message
                return
        elif self._start is not None:
            start, self._start = self._start, None
            whole = None if message.get("more_body", False) else self._whole(start, message.get("body", b""))
            if whole is not None:
                await self._write(whole)
                self._end()
                return
            await super().send(start)
        elif self._streams and message.get("more_body", False) and (body := message.get("body")):
            await self._write(b"%x\r\n%b\r\n" % (len(body), body))
            return
        await super().send(message)

    @property
    def _streams(self) -> bool:
        return self.chunked_encoding is True and not self.response_complete and self.scope["method"] != "HEAD"

    def _whole(self, start: dict[str, Any], body: bytes) -> bytes | None:
        """Head and body; None if uvicorn is to look at them."""
        if not self.keep_alive or self.scope["method"] == "HEAD" or start["status"] in _NO_BODY:
            return None
        headers = [*self.default_headers, *start["headers"]]
        names = [name for name, _ in headers]
        if (b"content-length", b"%d" % len(body)) not in headers or not _LEFT_TO_UVICORN.isdisjoint(names):
            return None
        if _NOT_IN_NAMES.search(b"".join(names)) or _NOT_IN_VALUES.search(b"".join([value for _, value in headers])):
            return None
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        return b"%b%b\r\n%b" % (STATUS_LINE[start["status"]], lines, body)

    async def _write(self, data: bytes) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self.response_started = True
            self.transport.write(data)

    def _end(self) -> None:
        if self.disconnected:
            return
        self.waiting_for_100_continue = False
        self.response_complete = True
        self.message_event.set()
        self.on_response()
