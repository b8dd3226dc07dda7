"""Tells every gateway process through Redis or Valkey that something was done, so that each looks at once (deeds.py).

A message says nothing but that: what was done is read from the log, so that neither a lost nor an invented message
changes what a process believes. Without the server each looks by its own interval.
"""

import asyncio
from contextlib import suppress
from typing import Final

from tenancy.meters.servers import TROUBLE, open_listener

CHANNEL: Final = "pagegate:deeds"
_TELL_S_MAX: Final = 1.0


async def tell(url: str) -> None:
    """Once. Never raises for the server's sake, and takes a second at most."""
    with suppress(*TROUBLE):
        async with asyncio.timeout(_TELL_S_MAX), open_listener(url) as client:
            await client.publish(CHANNEL, "")


class DeedNews:
    """`run` as a task, in the event loop in which it was made."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._due = asyncio.Event()

    def poke(self) -> None:
        """Something was done in this process."""
        self._due.set()

    async def run(self) -> None:
        """For ever. Deeds that come while one is told are told together."""
        while True:
            await self._due.wait()
            self._due.clear()
            await tell(self._url)
