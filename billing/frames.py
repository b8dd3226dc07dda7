"""Frames: how one record lies in a spool segment, and how records are found again in damaged bytes. Pure.

    | magic, 4 bytes | payload length, u32 LE | CRC32 of the payload, u32 LE | payload |

The magic holds bytes that no UTF-8 text has, so that reading can begin again behind damage and never inside a payload.
"""

import struct
import zlib
from dataclasses import dataclass

_MAGIC = b"\xf5PG\xfa"
_HEADER = struct.Struct("<4sII")
PAYLOAD_BYTES_MAX = 64 * 1024
FRAME_BYTES_MAX = _HEADER.size + PAYLOAD_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Split:
    """Whole frames of a stretch of bytes: (payload, offset behind it), in order.

    rest: where the first byte that belongs to none of them is. damaged: that what is there can't become a frame,
    however many bytes follow; False if it may only be cut off.
    """

    frames: list[tuple[bytes, int]]
    rest: int
    damaged: bool


def encode(payload: bytes) -> bytes:
    assert len(payload) <= PAYLOAD_BYTES_MAX, "a record is far smaller than this"
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def split(data: bytes, offset: int = 0) -> Split:
    """Take whole frames from `offset` on, up to the first that is cut off or damaged."""
    frames: list[tuple[bytes, int]] = []
    while len(data) - offset >= _HEADER.size:
        magic, length, crc = _HEADER.unpack_from(data, offset)
        if magic != _MAGIC or length > PAYLOAD_BYTES_MAX:
            return Split(frames, offset, damaged=True)
        start = offset + _HEADER.size
        end = start + length
        if end > len(data):
            return Split(frames, offset, damaged=False)
        payload = data[start:end]
        if zlib.crc32(payload) != crc:
            return Split(frames, offset, damaged=True)
        frames.append((payload, end))
        offset = end
    beginning = data[offset : offset + len(_MAGIC)]
    return Split(frames, offset, damaged=not _MAGIC.startswith(beginning))


def find_frame(data: bytes, offset: int) -> int | None:
    """Where the next whole frame at or behind `offset` begins, None if there is none."""
    while (offset := data.find(_MAGIC, offset)) >= 0:
        if is_frame(data, offset):
            return offset
        offset += 1
    return None


def is_frame(data: bytes, offset: int) -> bool:
    """Whether a whole frame begins exactly at `offset`."""
    if len(data) - offset < _HEADER.size:
        return False
    magic, length, crc = _HEADER.unpack_from(data, offset)
    start = offset + _HEADER.size
    whole = magic == _MAGIC and length <= PAYLOAD_BYTES_MAX and start + length <= len(data)
    return bool(whole and zlib.crc32(data[start : start + length]) == crc)
