"""Notices a client that leaves while we work for it: the work is cancelled, and ClientGone says why.

Used around every wait for the gateway and around a running stream. A non-streaming handler is not cancelled by the
server when its client leaves, so somebody must notice: the connection itself where http_protocol.py serves, else a task
that listens.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Self

from starlette.requests import Request
from starlette.types import Receive


class ClientGone(Exception):
    """The client left. An outcome, not an error: nobody is there to read an answer."""


class Departure:
    """A connection's word that its client has left, for the one request that is served on it at a time."""

    __slots__ = ("_listener", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._listener: Callable[[], object] | None = None

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Be called when it happens, instead of whoever listened before; None: nobody any more."""
        self._listener = listener

    def tell(self) -> None:
        self.happened = True
        if self._listener is not None:
            self._listener()


class ClientWatch:
    """`async with ClientWatch(receive):` runs its body until it ends or the client leaves.

    On departure the current task is cancelled inside the block and the cancellation turns into ClientGone at its edge,
    as asyncio.timeout does it; a cancellation from elsewhere passes through untouched. The request's body must have
    been read whole. `every_s` sets how often `tick` is called meanwhile (streams: heartbeats). departure: where the
    connection tells it; without one, or with ticks, a task of the watch's own listens.
    """

    def __init__(self, receive: Receive, *, every_s: float | None = None, departure: Departure | None = None) -> None:
        self._receive = receive
        self._every_s = every_s
        self._departure = departure
        self._listener: asyncio.Task[None] | None = None
        self._gone = False

    async def tick(self) -> bool:
        """Called every `every_s` seconds. False: the client is to be treated as gone."""
        return True

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        self._task = task
        self._cancelling = task.cancelling()
        if self._departure is None:
            self._listener = asyncio.create_task(self._listen(), name="client watch")
        elif self._departure.happened:
            raise ClientGone
        else:
            self._departure.listen(self._cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None  # its traceback holds this watch: requests are to die by their reference counts
        if self._departure is not None:
            self._departure.listen(None)
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error

    async def _listen(self) -> None:
        gone = False
        while not gone:
            try:
                async with nullcontext() if self._every_s is None else asyncio.timeout(self._every_s):
                    message = await self._receive()
            except TimeoutError:
                gone = not await self.tick()
            else:
                gone = message["type"] == "http.disconnect"
        self._cancel()

    def _cancel(self) -> None:
        self._gone = True
        self._task.cancel()


def watch_for_departure(request: Request) -> ClientWatch:
    """The watch of a request whose body has been read."""
    return ClientWatch(request.receive, departure=request.scope["state"].get("departure"))
