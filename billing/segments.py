"""The files of a spool: numbered segments, read from any position, and the checkpoint beside them.

A segment is named by the position of its first byte, so a position alone says where a record is. Used by spool.py,
which appends; knows no record's meaning.
"""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from billing.frames import FRAME_BYTES_MAX, find_frame, split

_SUFFIX = ".spool"
_CHECKPOINT = "checkpoint"
_WINDOW_BYTES = 4 * FRAME_BYTES_MAX  # any frame fits, and a batch of the drain is about one window

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    path: Path
    start: int  # position of its first byte


@dataclass(slots=True)
class Damage:
    """How many stretches of bytes were no records and were skipped; any is an alarm."""

    stretches: int = 0


def segment_at(directory: Path, start: int) -> Segment:
    return Segment(directory / f"{start:020d}{_SUFFIX}", start)


def list_segments(directory: Path) -> list[Segment]:
    """In order of position."""
    return sorted(
        (Segment(path, int(path.stem)) for path in directory.glob(f"*{_SUFFIX}")),
        key=lambda segment: segment.start,
    )


def read_segment(segment: Segment, position: int, until: int, damage: Damage) -> Iterator[tuple[bytes, int]]:
    """(payload, position behind it) of each whole record from `position` up to `until`; damaged bytes are skipped."""
    skipping = False
    with segment.path.open("rb") as file:
        while position < until:
            file.seek(position - segment.start)
            data = file.read(min(_WINDOW_BYTES, until - position))
            found = split(data)
            for payload, end in found.frames:
                yield payload, position + end
            if found.rest:
                position += found.rest
                skipping = False
                continue
            following = find_frame(data, 1)
            last = len(data) < _WINDOW_BYTES
            if following is None and last and not found.damaged:
                return  # cut off at the end: the record was never finished
            if not skipping:
                skipping = True
                damage.stretches += 1
                log.error("spool_damaged", segment=segment.path.name, offset=position - segment.start)
            if following is None and last:
                return
            position += len(data) - FRAME_BYTES_MAX if following is None else following


def cut_torn_tail(segment: Segment) -> int:
    """Cut what follows the last whole record, and return the position behind it."""
    data = segment.path.read_bytes()
    offset = end = 0
    while True:
        found = split(data, offset)
        if found.frames:
            end = found.frames[-1][1]
        following = find_frame(data, found.rest + 1)
        if following is None:
            break
        offset = following
    if end < len(data):
        log.warning("spool_torn_tail_cut", segment=segment.path.name, bytes=len(data) - end)
        with segment.path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    return segment.start + end


def write_checkpoint(directory: Path, position: int) -> None:
    """Replace the checkpoint at once. Not synced: an older one, or none, only makes the reader begin earlier."""
    text = str(position).encode()
    draft = directory / f"{_CHECKPOINT}.new"
    draft.write_bytes(b"%s %08x\n" % (text, zlib.crc32(text)))
    draft.replace(directory / _CHECKPOINT)


def read_checkpoint(directory: Path) -> int | None:
    """The stored position, None if there is none or it is damaged."""
    try:
        text, _, checksum = (directory / _CHECKPOINT).read_bytes().strip().partition(b" ")
    except FileNotFoundError:
        return None
    if not text.isdigit() or checksum != b"%08x" % zlib.crc32(text):
        log.error("spool_checkpoint_damaged")
        return None
    return int(text)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
