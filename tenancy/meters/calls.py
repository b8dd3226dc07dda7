"""Calls of server-side functions over one connection: whoever calls in the same moment shares a round trip.

A task of its own talks to the server, in the order of the calls; callers wait for futures. So a caller that leaves
never cuts a reply in two, and a server in trouble fails all who wait at once. Used by meters/redis.py and the gateway's
sharing/redis.py.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import ResponseError

from tenancy.meters.servers import TROUBLE, FunctionCall, open_servers

__all__ = ["TROUBLE", "FunctionCalls"]

log = structlog.get_logger(__name__)

_BATCH_MAX = 500
_WAITING_MAX = 20_000
_CLOSE_S_MAX = 1.0


@dataclass(slots=True)
class _Call:
    """abandoned: told the reply that nobody waits for any more."""

    what: FunctionCall
    reply: "asyncio.Future[Any]"
    abandoned: Callable[[Any], None] | None


class FunctionCalls:
    """Belongs to one event loop, in which it is opened and closed. timeout_s: of one round trip, and of connecting."""

    def __init__(self, url: str, library: str, *, timeout_s: float) -> None:
        self._servers = open_servers(url, timeout_s=timeout_s)
        self._library = library
        self._waiting: list[_Call] = []
        self._wake = asyncio.Event()
        self._closed = False
        self._talker: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start, and load the library. Raises one of TROUBLE if the server is away: calls may be made all the same."""
        self._talker = asyncio.create_task(self._talk(), name="meters' calls")
        await self.load()

    async def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._talker is not None:
            await asyncio.wait({self._talker}, timeout=_CLOSE_S_MAX)
            self._talker.cancel()
            with suppress(asyncio.CancelledError):
                await self._talker
        await self._servers.close()

    async def load(self) -> None:
        await self._servers.load(self._library)

    def call(
        self,
        function: str,
        keys: list[str],
        arguments: list[str | int],
        *,
        abandoned: Callable[[Any], None] | None = None,
    ) -> "asyncio.Future[Any]":
        """The reply to come. It fails with one of TROUBLE; then the server may have run the function or not."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._closed or len(self._waiting) >= _WAITING_MAX:
            reply.set_exception(ConnectionError("closed, or too many calls are waiting"))
            return reply
        self._waiting.append(_Call(FunctionCall(function, keys, arguments), reply, abandoned))
        self._wake.set()
        return reply

    async def _talk(self) -> None:
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH_MAX], self._waiting[_BATCH_MAX:]
                try:
                    replies = await self._exchange(batch)
                except TROUBLE as error:
                    # Those behind would only wait for the same trouble.
                    batch, self._waiting = batch + self._waiting, []
                    replies = [error] * len(batch)
                for call, reply in zip(batch, replies, strict=True):
                    _answer(call, reply)

    async def _exchange(self, batch: list[_Call]) -> list[Any]:
        replies = await self._send(batch)
        lost = [index for index, reply in enumerate(replies) if _is_unknown_function(reply)]
        if lost:
            # The server was started again or flushed: it counts from nothing, and needs its functions.
            log.warning("the limits' functions were lost and are loaded again")
            await self.load()
            for index, reply in zip(lost, await self._send([batch[index] for index in lost]), strict=True):
                replies[index] = reply
        return replies

    async def _send(self, batch: list[_Call]) -> list[Any]:
        return await self._servers.send([call.what for call in batch])


def _answer(call: _Call, reply: Any) -> None:
    if call.reply.done():
        if call.abandoned is not None and not isinstance(reply, Exception):
            call.abandoned(reply)
    elif isinstance(reply, Exception):
        call.reply.set_exception(reply)
    else:
        call.reply.set_result(reply)


def _is_unknown_function(reply: Any) -> bool:
    return isinstance(reply, ResponseError) and "function not found" in str(reply).lower()
