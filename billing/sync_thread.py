"""One thread that makes a spool's files durable, one job after the other. Used by spool.py alone."""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from billing.segments import sync_directory


@dataclass(frozen=True, slots=True)
class Sync:
    """One job: finish the segments that were left, then the current one, which then is durable up to `target`."""

    target: int
    descriptor: int
    left: tuple[int, ...]  # descriptors of full segments: synced and closed
    abandoned: tuple[int, ...]  # descriptors of failed segments: closed
    directory: Path | None  # synced if a segment was made

    def run(self) -> None:
        """Raises OSError if anything may not be durable; what is to be closed is closed all the same."""
        with ExitStack() as closing:
            for descriptor in (*self.left, *self.abandoned):
                closing.callback(os.close, descriptor)
            for descriptor in self.left:
                os.fsync(descriptor)
            os.fdatasync(self.descriptor)
            if self.directory is not None:
                sync_directory(self.directory)


class SyncThread:
    """A thread of its own and no pool: a job is one hand-over there and one back, however many wait for it."""

    def __init__(self, done: Callable[[Sync, OSError | None], None]) -> None:
        """done: called on the loop from which a job came."""
        self._done = done
        self._jobs: SimpleQueue[tuple[Sync, asyncio.AbstractEventLoop] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="spool sync", daemon=True)
        self._thread.start()

    def begin(self, job: Sync) -> None:
        self._jobs.put((job, asyncio.get_running_loop()))

    def close(self) -> None:
        """Return when the jobs that were begun are done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            sync, loop = job
            error: OSError | None = None
            try:
                sync.run()
            except OSError as raised:
                error = raised
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(self._done, sync, error)
