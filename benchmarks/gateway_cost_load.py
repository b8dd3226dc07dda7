"""The load of gateway_cost.py: keep-alive connections that each send the next request when the last answer is whole.

A raw protocol, since the generator shares a core with the engine. Every answer is checked: status, events, [DONE].
"""

import asyncio
import re
from dataclasses import dataclass
from typing import cast

_CONTENT_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
ANSWER_S_MAX = 60.0


class BadAnswer(Exception):
    """A gateway under test answered something else than it should: its figures would be worthless."""


@dataclass(frozen=True, slots=True)
class Load:
    """requests in all, over so many connections at once. chunks: None for whole answers."""

    requests: int
    connections: int
    chunks: int | None


def request_bytes(port: int, key: str, body: bytes) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nauthorization: Bearer %b\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    ) % (port, key.encode(), len(body), body)


async def run_load(port: int, request: bytes, load: Load) -> None:
    """Sends the load and returns when every answer is there. Raises BadAnswer."""
    left = [load.requests]
    async with asyncio.TaskGroup() as group:
        for number in range(load.connections):
            group.create_task(_client(port, request, load, left), name=f"connection {number}")


async def _client(port: int, request: bytes, load: Load, left: list[int]) -> None:
    transport, connection = await asyncio.get_running_loop().create_connection(_Exchange, "127.0.0.1", port)
    try:
        while left[0] > 0:
            left[0] -= 1
            async with asyncio.timeout(ANSWER_S_MAX):
                answer = await connection.exchange(request)
            _check(answer, load.chunks)
    finally:
        transport.close()


def _check(answer: bytes, chunks: int | None) -> None:
    if not answer.startswith(b"HTTP/1.1 200"):
        raise BadAnswer(answer[:500])
    if chunks is None:
        if b'"finish_reason":"stop"' not in answer:
            raise BadAnswer(answer[-500:])
    elif answer.count(b'"content":" Paris"') != chunks or answer.count(b"data: [DONE]") != 1:
        raise BadAnswer(answer[-500:])


class _Exchange(asyncio.Protocol):
    """One request and its whole answer at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._whole: asyncio.Future[bytes] | None = None
        self._ends_at: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its base class

    def connection_lost(self, exc: Exception | None) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(BadAnswer(f"the connection was closed: {exc}"))

    async def exchange(self, request: bytes) -> bytes:
        assert self._transport is not None, "connected"
        self._received.clear()
        self._ends_at = None
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._whole

    def data_received(self, data: bytes) -> None:
        self._received += data
        assert self._whole is not None, "asked"
        if self._ends_at is None:
            head = self._received.find(b"\r\n\r\n")
            if head < 0:
                return
            length = _CONTENT_LENGTH.search(self._received, 0, head)
            self._ends_at = head + 4 + int(length.group(1)) if length else -1
        whole = self._received.endswith(b"0\r\n\r\n") if self._ends_at < 0 else len(self._received) >= self._ends_at
        if whole and not self._whole.done():
            self._whole.set_result(bytes(self._received))
