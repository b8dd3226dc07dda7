"""The bytes between a prefill and a decode process: a line of JSON after the other, and raw pages after a header.

    decode → prefill    {"hello": …}
    prefill → decode    {"alive": true}        while it waits and computes, every HEARTBEAT_S
                        {"header": …}, bytes   the pages
                        {"refused": "why"}     instead
    decode → prefill    {"received": true}

Used by offer.py and fetch.py. Every read has a bound in bytes and in seconds.
"""

import asyncio
from typing import Any

import orjson

LINE_BYTES_MAX = 1 << 16
HEARTBEAT_S = 1.0
SILENCE_S_MAX = 10.0
"""A process that says nothing for so long is stopped or gone, even if its connection is open."""
_PIECE_BYTES = 1 << 20


class HandoverBroke(Exception):
    """The other side has gone, fell silent, or says something that is not of this protocol."""


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises HandoverBroke."""
    try:
        async with asyncio.timeout(SILENCE_S_MAX):
            line = await reader.readuntil(b"\n")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError) as error:
        raise HandoverBroke(f"no line came: {type(error).__name__}") from error
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise HandoverBroke("a line that is not JSON came") from error
    if not isinstance(said, dict):
        raise HandoverBroke("a line that is no object came")
    return said


async def read_data(reader: asyncio.StreamReader, size: int) -> bytearray:
    """Raises HandoverBroke."""
    data = bytearray()
    while len(data) < size:
        try:
            async with asyncio.timeout(SILENCE_S_MAX):
                piece = await reader.read(min(size - len(data), _PIECE_BYTES))
        except (OSError, TimeoutError) as error:
            raise HandoverBroke(f"the pages stopped coming: {type(error).__name__}") from error
        if not piece:
            raise HandoverBroke("the pages ended early")
        data += piece
    return data


async def write_line(writer: asyncio.StreamWriter, **said: Any) -> None:
    """Raises HandoverBroke."""
    await _write(writer, orjson.dumps(said) + b"\n")


async def write_data(writer: asyncio.StreamWriter, data: memoryview | bytearray) -> None:
    """In pieces, so that a slow reader costs no second copy. Raises HandoverBroke."""
    view = memoryview(data)
    for start in range(0, len(view), _PIECE_BYTES):
        await _write(writer, view[start : start + _PIECE_BYTES])


async def _write(writer: asyncio.StreamWriter, data: bytes | memoryview) -> None:
    try:
        writer.write(data)
        async with asyncio.timeout(SILENCE_S_MAX):
            await writer.drain()
    except (OSError, TimeoutError) as error:
        raise HandoverBroke(f"nobody reads: {type(error).__name__}") from error
