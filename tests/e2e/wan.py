"""A wide-area network for a test: relays between regions that deliver every byte half a round trip late, in order.

`python -m tests.e2e.wan ROUTES` runs in a network namespace of its own; ROUTES is JSON, a list of {"listen": [host,
port], "to": [host, port] or a Unix socket's path, "round_trip_s": {source address: seconds}}. Where a connection comes
from says how long its way is. What can't be reached is not refused: the connection stays open and nothing comes back,
as where packets are lost.
"""

import asyncio
import json
import sys
from contextlib import suppress
from functools import partial
from typing import Any

# As much as is under way at once; the sender then waits.
_PIECES_MAX = 256
_PIECE_BYTES = 1 << 16
_AGAIN_S = 0.2


async def relay(routes: list[dict[str, Any]]) -> None:
    """For ever."""
    for route in routes:
        await asyncio.start_server(partial(_carry, route), *route["listen"])
    await asyncio.Event().wait()


async def _carry(route: dict[str, Any], near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
    round_trip_s = route["round_trip_s"][back.get_extra_info("peername")[0]]
    accepted_at = asyncio.get_running_loop().time()
    there: asyncio.StreamWriter | None = None
    # The three-way handshake with the other end has not been seen by the near one: it takes a round trip.
    sent: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES_MAX)
    answered: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES_MAX)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_take(near, sent, round_trip_s / 2, not_before=accepted_at + round_trip_s))
            far, there = await _connected(route["to"])
            group.create_task(_deliver(sent, there))
            group.create_task(_take(far, answered, round_trip_s / 2))
            group.create_task(_deliver(answered, back))
    except* OSError:
        pass  # one end is gone: so is the way
    finally:
        for writer in (back, there):
            if writer is not None:
                writer.transport.abort()


async def _connected(to: list[Any] | str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        with suppress(OSError):
            if isinstance(to, str):
                return await asyncio.open_unix_connection(to)
            return await asyncio.open_connection(*to)
        await asyncio.sleep(_AGAIN_S)


async def _take(
    reader: asyncio.StreamReader, way: asyncio.Queue[tuple[float, bytes]], late_s: float, *, not_before: float = 0.0
) -> None:
    """Until it ends, which travels like what came before. Raises OSError if it breaks off."""
    loop = asyncio.get_running_loop()
    while True:
        piece = await reader.read(_PIECE_BYTES)
        await way.put((max(not_before, loop.time()) + late_s, piece))
        if not piece:
            return


async def _deliver(way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_at, piece = await way.get()
        await asyncio.sleep(max(0.0, due_at - loop.time()))
        if not piece:
            raise ConnectionResetError
        writer.write(piece)
        await writer.drain()


if __name__ == "__main__":
    asyncio.run(relay(json.loads(sys.argv[1])))
