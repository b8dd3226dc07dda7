"""Where the scripted halves of a prefill/decode pair meet: one room a request, by SGLang's order of events.

Decode takes its pages first, then prefill computes, hands over and answers, and only then decode has its first token.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from tests.doubles.generation import FailedInside, Generation


class PrefillLost(Exception):
    """Decode has heard that prefill won't hand anything over."""


@dataclass(slots=True)
class Room:
    joined: asyncio.Event = field(default_factory=asyncio.Event)  # decode has its pages
    handed_over: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)  # prefill is gone


class Rooms:
    """Shared by the two engines of a pair. seen: every room that a half has come to."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = defaultdict(Room)

    @property
    def seen(self) -> list[int]:
        return list(self._rooms)

    async def decode_has_pages(self, room: int, generation: Generation) -> None:
        """Returns once prefill has handed over. Raises PrefillLost, or FailedInside when aborted."""
        met = self._rooms[room]
        met.joined.set()
        await _first_of(met.handed_over, met.lost, generation.stopped)
        if generation.stopped.is_set():
            raise FailedInside
        if not met.handed_over.is_set():
            raise PrefillLost

    async def prefill_waits(self, room: int, generation: Generation) -> None:
        """Returns once decode has its pages. Raises FailedInside when aborted."""
        met = self._rooms[room]
        await _first_of(met.joined, generation.stopped)
        if generation.stopped.is_set():
            raise FailedInside

    def handed_over(self, room: int) -> None:
        self._rooms[room].handed_over.set()

    def prefill_is_gone(self, room: int) -> None:
        self._rooms[room].lost.set()


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait(), name="an event") for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
