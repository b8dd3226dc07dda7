"""Notices a client that leaves while we work for it: the work is cancelled, and ClientGone says why.

Used around every wait for the gateway and around a running stream. A non-streaming handler is not cancelled by the
server when its client leaves, so somebody must listen; this is that listener, one task a request.
"""

import asyncio
from contextlib import nullcontext
from types import TracebackType
from typing import Self

from starlette.types import Receive


class ClientGone(Exception):
    """The client left. An outcome, not an error: nobody is there to read an answer."""


class ClientWatch:
    """`async with ClientWatch(receive):` runs its body until it ends or the client leaves.

    On departure the current task is cancelled inside the block and the cancellation turns into ClientGone at its edge,
    as asyncio.timeout does it; a cancellation from elsewhere passes through untouched. The request's body must have
    been read whole. `every_s` sets how often `tick` is called meanwhile (streams: heartbeats).
    """

    def __init__(self, receive: Receive, *, every_s: float | None = None) -> None:
        self._receive = receive
        self._every_s = every_s
        self._gone = False

    async def tick(self) -> bool:
        """Called every `every_s` seconds. False: the client is to be treated as gone."""
        return True

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "requests are served in tasks"
        self._task = task
        self._cancelling = task.cancelling()
        self._listener = asyncio.create_task(self._listen(), name="client watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.cancel()
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from error

    async def _listen(self) -> None:
        while not self._gone:
            try:
                async with nullcontext() if self._every_s is None else asyncio.timeout(self._every_s):
                    message = await self._receive()
            except TimeoutError:
                self._gone = not await self.tick()
            else:
                self._gone = message["type"] == "http.disconnect"
        self._task.cancel()
