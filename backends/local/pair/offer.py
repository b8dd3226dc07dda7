"""Prefill's side: rooms in which requests wait for their decode process, and the server to which it comes.

intake.py opens a room for every request, and wiring.py hands the pages in when the worker has them. Lives on the event
loop. Knows requests by id and room; what is computed when is the worker's affair.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from pydantic import ValidationError

from backends.local.errors import InvalidRequestError
from backends.local.pair.frames import (
    HEARTBEAT_S,
    LINE_BYTES_MAX,
    HandoverBroke,
    read_line,
    write_data,
    write_line,
)
from backends.local.pair.handover import DECODE_LOST, Handover, Hello
from backends.local.sequence import Failure

log = structlog.get_logger(__name__)

ROOM_WAIT_S_MAX = 300.0
"""How long one half waits for the other to come at all; SGLang's own bound."""
VISITORS_MAX = 1024
"""Connections at once; a decode process has one for each request that it waits for."""


class Prefilling(Protocol):
    """What the rooms ask of the worker."""

    def decode_joined(self, rid: str) -> None:
        """Somebody waits for its pages: compute them."""

    def pages_sent(self, rid: str) -> None:
        """They have arrived."""

    def fail(self, rid: str, failure: Failure) -> None:
        """End it; without effect once it has ended."""


@dataclass(slots=True, eq=False)
class _Room:
    rid: str
    prompt_digest: str
    pages: "asyncio.Future[Handover | None]"
    """None: the request ended without."""
    taken: bool = False
    deadline: asyncio.TimerHandle | None = field(default=None)


class Rooms:
    """listen: gives the pages of this process' requests to whoever names their room."""

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._worker: Prefilling | None = None
        self._rooms: dict[int, _Room] = {}
        self._by_rid: dict[str, int] = {}
        self._opened = asyncio.Condition()
        self._visits: set[asyncio.Task[None]] = set()

    def attach(self, worker: Prefilling) -> None:
        """The worker whose requests these are; it and the rooms need each other."""
        self._worker = worker

    def open(self, room: int, rid: str, prompt_digest: str) -> None:
        """A request waits for its other half from now on. Raises InvalidRequestError if its room is taken."""
        if room in self._rooms:
            raise InvalidRequestError(f"Another request is in bootstrap_room {room}.")
        loop = asyncio.get_running_loop()
        opened = _Room(rid, prompt_digest, loop.create_future())
        opened.deadline = loop.call_later(ROOM_WAIT_S_MAX, self._give_up, opened)
        self._rooms[room] = opened
        self._by_rid[rid] = room
        self._wake()

    def hand_in(self, rid: str, handover: Handover) -> None:
        """Its pages are ready; without effect if the request has ended meanwhile."""
        room = self._by_rid.get(rid)
        if room is not None and not self._rooms[room].pages.done():
            self._rooms[room].pages.set_result(handover)

    def ended(self, rid: str) -> None:
        """The request has ended, one way or another. Idempotent."""
        number = self._by_rid.pop(rid, None)
        if number is None:
            return
        room = self._rooms.pop(number)
        if room.deadline is not None:
            room.deadline.cancel()
        if not room.pages.done():
            room.pages.set_result(None)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        """Serve until the returned server is closed. host: `unix:` and a path make it a socket in the file system."""
        if host.startswith("unix:"):
            return await asyncio.start_unix_server(self._visit, host.removeprefix("unix:"), limit=LINE_BYTES_MAX)
        return await asyncio.start_server(self._visit, host, port, limit=LINE_BYTES_MAX)

    async def close(self) -> None:
        """End the visits that are going on."""
        for visit in list(self._visits):
            visit.cancel()
        await asyncio.gather(*self._visits, return_exceptions=True)

    def _wake(self) -> None:
        async def notify() -> None:
            async with self._opened:
                self._opened.notify_all()

        task = asyncio.create_task(notify(), name="room opened")
        self._visits.add(task)
        task.add_done_callback(self._visits.discard)

    def _give_up(self, room: _Room) -> None:
        if not room.taken:
            self._fail(room, DECODE_LOST)

    def _fail(self, room: _Room, failure: Failure) -> None:
        assert self._worker is not None
        self._worker.fail(room.rid, failure)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._visits.add(task)
        task.add_done_callback(self._visits.discard)
        try:
            if len(self._visits) > VISITORS_MAX:
                await write_line(writer, refused="too many connections")
                return
            await self._serve(reader, writer)
        except HandoverBroke as error:
            log.info("handover_broke", reason=str(error))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = Hello.model_validate((await read_line(reader)).get("hello"))
        except ValidationError:
            await write_line(writer, refused="not a hello")
            return
        room = await self._find(hello, reader, writer)
        refusal = self._refusal(hello, room)
        if room is None or refusal is not None:
            await write_line(writer, refused=refusal or "nobody came to this room")
            return
        assert self._worker is not None
        room.taken = True
        try:
            self._worker.decode_joined(room.rid)
            await self._wait(room.pages, reader, writer)
            handover = room.pages.result()
            if handover is None:
                await write_line(writer, refused="the request ended")
                return
            await _give(handover, hello, reader, writer)
        except (HandoverBroke, asyncio.CancelledError):
            self._fail(room, DECODE_LOST)
            raise
        self._worker.pages_sent(room.rid)

    def _refusal(self, hello: Hello, room: _Room | None) -> str | None:
        if hello.layout != self._layout:
            return f"the caches differ: prefill has {self._layout}, decode {hello.layout}"
        if room is not None and room.taken:
            return "the room is taken"
        if room is not None and room.prompt_digest != hello.prompt_digest:
            return "another prompt is in this room"
        return None

    async def _find(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Room | None:
        """The room, which may be opened later than decode comes; None if it never is."""
        if hello.room not in self._rooms and hello.layout == self._layout:
            opening = asyncio.ensure_future(self._until_open(hello.room))
            try:
                async with asyncio.timeout(ROOM_WAIT_S_MAX):
                    await self._wait(opening, reader, writer)
            except TimeoutError:
                return None
            finally:
                opening.cancel()
        return self._rooms.get(hello.room)

    async def _until_open(self, room: int) -> None:
        async with self._opened:
            await self._opened.wait_for(lambda: room in self._rooms)

    @staticmethod
    async def _wait(awaited: "asyncio.Future[Any]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until it is done, telling decode now and then that somebody is here. Raises HandoverBroke if it leaves."""
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            while not awaited.done():
                await asyncio.wait({awaited, leaving}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    raise HandoverBroke("decode left before it had its pages")
                if not awaited.done():
                    await write_line(writer, alive=True)
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)


async def _give(handover: Handover, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await write_line(writer, header=handover.header(hello.fence).model_dump())
    await write_data(writer, handover.data)
    if "received" not in await read_line(reader):
        raise HandoverBroke("decode refused the pages")
