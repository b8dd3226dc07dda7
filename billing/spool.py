"""The durable local record: append now, be durable at the next shared sync, be read back from a checkpoint.

Metering appends to it and drains it; one process owns a directory. Positions count bytes from the first record ever, so
they only grow. Appends run on the event loop, a write to the page cache each; one thread syncs, and every record that
was appended before a sync began shares it. Knows no record's meaning.

When the disk refuses (full, input/output error) the spool has failed: nothing is appended or confirmed until a probe,
in a new segment, has been synced. After a failed sync the system may have dropped what it could not write, so syncing
the same file again would prove nothing (https://wiki.postgresql.org/wiki/Fsync_Errors).
"""

import asyncio
import errno
import fcntl
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NewType

import structlog

from billing.errors import BillingUnavailable
from billing.frames import encode
from billing.segments import (
    Damage,
    cut_torn_tail,
    list_segments,
    read_checkpoint,
    read_segment,
    segment_at,
    write_checkpoint,
)
from billing.sync_thread import Sync, SyncThread

Position = NewType("Position", int)

_MIB = 1024 * 1024
_OWNER_BYTES = 16
_NAME_BYTES_MAX = 64
_PROBE = b""  # no record is empty, so readers pass it by

log = structlog.get_logger(__name__)


class SpoolInUse(OSError):
    """Another process owns the directory."""


class Spool:
    def __init__(
        self,
        directory: Path,
        *,
        segment_bytes_max: int = 64 * _MIB,
        high_water_bytes: int = 1024 * _MIB,
    ) -> None:
        """Open the directory, made if need be. Raises SpoolInUse if another process has it open."""
        self._directory = directory
        self._segment_bytes_max = segment_bytes_max
        self._high_water_bytes = high_water_bytes
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _own(directory)
        self._checkpoint = 0
        self._damage = Damage()
        self._failed = False
        self._closed = False
        self._left: list[int] = []
        self._abandoned: list[int] = []
        self._doubtful_from = self._doubtful_to = 0  # nobody may be told that bytes between these are durable
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._syncing = False
        self._segments = list_segments(directory)
        self._segments_lock = threading.Lock()  # the drain's thread deletes what the loop's thread adds
        self._open_end()
        self._thread = SyncThread(self._synced_to)

    @property
    def owner(self) -> str:
        """A name that stays with the folder, and with no copy of it: of whoever's records lie in it, in this life or an
        earlier one.
        """
        return os.pread(self._lock, 2 * _OWNER_BYTES, 0).decode()

    @property
    def end(self) -> Position:
        """Where the next record will begin."""
        return Position(self._end)

    @property
    def checkpoint(self) -> Position:
        """Everything before it has been drained, in this life of the spool or an earlier one."""
        return Position(self._checkpoint)

    @property
    def used_bytes(self) -> int:
        return self._end - self._segments[0].start

    @property
    def damaged_stretches(self) -> int:
        return self._damage.stretches

    @property
    def failed(self) -> bool:
        return self._failed

    def append(self, record: bytes, *, admits: bool = False) -> Position:
        """Write one record, not yet durable; returns the position to commit. Raises BillingUnavailable.

        admits: it begins new work, which is refused at the high-water mark. What ends work always goes in.
        """
        assert record, "a record is not empty"
        if self._failed:
            raise _unavailable()
        if admits and self.used_bytes >= self._high_water_bytes:
            raise BillingUnavailable("Too many usage records wait for the database.", retry_after_s=5)
        return self._append(encode(record))

    async def commit(self, position: Position | None) -> None:
        """Return when everything up to `position` is durable. Raises BillingUnavailable if it can't be known to be.

        None: of a record that could not be appended.
        """
        if self._failed or position is None or self._doubtful_from < position <= self._doubtful_to:
            raise _unavailable()
        if position <= self._synced:
            return
        await self._synced_behind(position)

    async def probe(self) -> None:
        """Try a failed spool again, in a new segment. Raises BillingUnavailable if it is still of no use."""
        if not self._failed or self._closed:
            return
        try:
            if self._end > self._segment_start:
                self._abandoned.append(self._begin_segment())
            else:
                os.ftruncate(self._descriptor, 0)  # half a record may have stayed
        except OSError as error:
            self._fail(error)
            raise _unavailable() from error
        self._abandoned += self._left
        self._left = []
        self._doubtful_from, self._doubtful_to = self._synced, self._end
        await self._synced_behind(self._append(encode(_PROBE)))
        self._failed = False
        log.info("spool_recovered")

    def read(self, position: int, until: int) -> Iterator[tuple[bytes, Position]]:
        """(record, position behind it) from `position` to `until`. For any thread; `until` must have been appended."""
        with self._segments_lock:
            segments = list(self._segments)
        for index, segment in enumerate(segments):
            end = segments[index + 1].start if index + 1 < len(segments) else until
            if end > position and segment.start < until:
                for record, behind in read_segment(
                    segment, max(position, segment.start), min(end, until), self._damage
                ):
                    if record != _PROBE:
                        yield record, Position(behind)

    def save_checkpoint(self, position: int) -> None:
        """Remember that all before `position` has been drained, and delete what lies wholly before. For any thread."""
        if position <= self._checkpoint:
            return
        try:
            write_checkpoint(self._directory, position)
        except OSError as error:
            # On a full disk what has been drained must go all the same: an older checkpoint is no harm.
            log.warning("spool_checkpoint_not_written", error=str(error))
        self._checkpoint = position
        self._delete_drained()

    def close(self) -> None:
        """Sync what was appended and give the directory up. Idempotent."""
        if self._closed:
            return
        self._closed = self._failed = True
        self._thread.close()
        self._refuse_waiters()
        with suppress(OSError):  # nobody waits for these records any more, and the next start reads what is there
            self._sync_job().run()
        os.close(self._descriptor)
        os.close(self._lock)

    def _append(self, frame: bytes) -> Position:
        try:
            used = self._end - self._segment_start
            if used and used + len(frame) > self._segment_bytes_max:
                self._left.append(self._begin_segment())
            _write_whole(self._descriptor, frame)
        except OSError as error:
            self._fail(error)
            with suppress(OSError):  # what remains is skipped as damage: it is behind the end
                os.ftruncate(self._descriptor, self._end - self._segment_start)
            raise _unavailable() from error
        self._end += len(frame)
        return Position(self._end)

    def _open_end(self) -> None:
        end = cut_torn_tail(self._segments[-1]) if self._segments else 0
        checkpoint = read_checkpoint(self._directory)
        # Records that were drained before they were durable may be gone after a power cut; their positions are used up.
        self._end = end if checkpoint is None else max(end, checkpoint)
        first = self._segments[0].start if self._segments else 0
        self._checkpoint = first if checkpoint is None else checkpoint
        self._synced = self._end
        if self._segments and self._end == end:
            self._segment_start = self._segments[-1].start
            self._descriptor = os.open(self._segments[-1].path, os.O_WRONLY | os.O_APPEND)
            self._directory_dirty = False
            os.fdatasync(self._descriptor)  # what a killed process appended is durable before anything relies on it
        else:
            self._descriptor = self._create_segment()
        self._delete_drained()

    def _begin_segment(self) -> int:
        """Append to a new segment from now on; returns the descriptor of the one before."""
        before, self._descriptor = self._descriptor, self._create_segment()
        return before

    def _create_segment(self) -> int:
        segment = segment_at(self._directory, self._end)
        descriptor = os.open(segment.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._directory_dirty = True
        self._segment_start = segment.start
        with self._segments_lock:
            self._segments = [*self._segments, segment]
        return descriptor

    def _delete_drained(self) -> None:
        with self._segments_lock:
            starts = [segment.start for segment in self._segments[1:]]
            drained = sum(1 for start in starts if start <= self._checkpoint)
            gone, self._segments = self._segments[:drained], self._segments[drained:]
        for segment in gone:
            segment.path.unlink(missing_ok=True)

    async def _synced_behind(self, position: Position) -> None:
        """Return after a sync that began when everything up to `position` had been appended."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append((position, waiter))
        if not self._syncing:
            # Begun at the end of this turn of the loop, so that whatever else was ready has appended too.
            self._syncing = True
            loop.call_soon(self._begin_sync)
        await waiter

    def _begin_sync(self) -> None:
        if not self._closed:
            self._thread.begin(self._sync_job())

    def _sync_job(self) -> Sync:
        directory = self._directory if self._directory_dirty else None
        job = Sync(self._end, self._descriptor, tuple(self._left), tuple(self._abandoned), directory)
        self._left, self._abandoned, self._directory_dirty = [], [], False
        return job

    def _synced_to(self, sync: Sync, error: OSError | None) -> None:
        self._syncing = False
        if error is not None:
            self._directory_dirty = True
            self._fail(error)
            return
        self._synced = max(self._synced, sync.target)
        while self._waiters and self._waiters[0][0] <= sync.target:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if self._waiters:
            self._syncing = True
            self._begin_sync()

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            log.error("spool_failed", error=str(error))
        self._failed = True
        self._refuse_waiters()

    def _refuse_waiters(self) -> None:
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(_unavailable())


def _own(directory: Path) -> int:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SpoolInUse(error.errno, "The spool is in use by another process", str(directory)) from error
    _name(descriptor)
    return descriptor


def _name(descriptor: int) -> None:
    """Keep the owner's name beside the number of the file that it was drawn for. In a copy of the folder the file has
    another one, and gets a name of its own: two gateways with one name would each hold the other's money.
    """
    owner, _, number = os.pread(descriptor, _NAME_BYTES_MAX, 0).decode().partition(" ")
    mine = str(os.fstat(descriptor).st_ino)
    if number == mine:
        return
    if number or len(owner) != 2 * _OWNER_BYTES:  # the version before kept no number
        owner = secrets.token_hex(_OWNER_BYTES)
    named = f"{owner} {mine}".encode()
    os.pwrite(descriptor, named, 0)
    os.ftruncate(descriptor, len(named))
    os.fsync(descriptor)


def is_owned(directory: Path) -> bool:
    """Whether some process has it open now; one that opens it in this very instant may be told that it is in use."""
    try:
        os.close(_own(directory))
    except SpoolInUse:
        return True
    return False


def _write_whole(descriptor: int, frame: bytes) -> None:
    written = os.write(descriptor, frame)
    if written != len(frame):  # a disk that is nearly full
        raise OSError(errno.ENOSPC, f"{written} of {len(frame)} bytes written")


def _unavailable() -> BillingUnavailable:
    return BillingUnavailable("The usage record can't be written now, so nothing billable is taken.", retry_after_s=5)
