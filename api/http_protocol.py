"""uvicorn's HTTP/1.1 protocol and what it lacks: bounds on unfinished request heads, bodies of clients that offer
another protocol, word of a departed client without a task that listens for it and of a body that is all there, and
streams that an HTTP/1.0 client can read.

Named by the command that serves; everything else sees plain ASGI. uvicorn is held to 0.x in pyproject.toml, and the
tests beside this file drive real sockets, since it relies on how that protocol works inside.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final
from weakref import ref

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from api.answer_writer import AnswerWriter
from api.departure import Departure

_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LONG: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
# The parser keeps an unfinished line and joins each piece that arrives to all before it.
_HEAD_BYTES_MAX: Final = 65_536
# Java's client offers HTTP/2 so with each request to an http:// URL, and we may pass over it (RFC 9110, 7.8). The
# parser would take all that follows the head for the other protocol, and the request for one without a body.
_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*", re.IGNORECASE)


class HttpProtocol(HttpToolsProtocol):
    """One client's connection. head_s_max: seconds for a request's first byte to its last header line.

    A head that has not ended may have 64 KiB, give or take what arrives in one piece; so may what follows the last
    chunk of a body.
    """

    head_s_max = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._departure = Departure()
        self._head_is_open = self._body_is_open = self._begun = False
        self._open_bytes = 0  # that came since a head ended, or a part of a body
        self._head_timer: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._departure.tell()

    def data_received(self, data: bytes) -> None:
        self._open_bytes += len(data)
        if b"pgrade" in data and not self._body_is_open:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._open_bytes > _HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse_length()
        if self._head_is_open:
            if self._head_timer is None and not self.transport.is_closing():
                self._await_head()
        elif self._head_timer is not None:
            self._stop_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_is_open = self._begun = True
        self.scope["state"]["departure"] = self._departure

    def on_body(self, body: bytes) -> None:
        self._open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_is_open = False
        self._open_bytes = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._head_is_open, self._body_is_open = False, True
        self._open_bytes = 0
        super().on_headers_complete()
        cycle = self.cycle
        self.scope["state"]["body_arrived"] = partial(_body_arrived, ref(cycle))
        if self.scope["http_version"] == "1.0":
            cycle.send = partial(_send_until_close, cycle, cycle.send)  # type: ignore[method-assign]  # of this one
        else:
            cycle.__class__ = AnswerWriter

    def _await_head(self) -> None:
        """Usually a head comes in one piece: then no timer is made but for a connection's first."""
        self._head_timer = self.loop.call_later(self.head_s_max, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_length(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_TOO_LONG)
        self.transport.close()

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # a request sent ahead, while we answer the one before
            return
        if self._begun:
            self.transport.write(_TOO_SLOW)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head) + end + rest


def _body_arrived(cycle: "ref[RequestResponseCycle]") -> bool:
    """Weakly, since the cycle holds the scope that holds this: requests are to die by their reference counts."""
    found = cycle()
    return found is None or not found.more_body


async def _send_until_close(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: dict[str, Any]
) -> None:
    """HTTP/1.0 knows no chunks: an answer of unknown length ends where its connection ends."""
    begins = message["type"] == "http.response.start"
    if cycle.chunked_encoding is False or (begins and any(name == b"content-length" for name, _ in message["headers"])):
        await send(message)
        return
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    if begins:
        cycle.response_started, cycle.keep_alive = True, False
        lines = b"".join(b"%b: %b\r\n" % header for header in message["headers"])
        cycle.transport.write(b"%b%bconnection: close\r\n\r\n" % (STATUS_LINE[message["status"]], lines))
        return
    cycle.transport.write(message.get("body", b""))
    if not message.get("more_body", False):
        cycle.response_complete = True
        cycle.message_event.set()
        cycle.transport.close()
        cycle.on_response()
