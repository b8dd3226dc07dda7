"""What one process has of files and batches: made by api/batching.py, used by routes and the composition root."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from gateway.batches.files import FileStore
from gateway.batches.judging import Figures
from gateway.batches.store import BatchStore

# Each is a transaction of its own: together they hold a thread of the database for seconds at most.
_ROUNDS_MAX: Final = 50


@dataclass(frozen=True, slots=True)
class Batching:
    """wake: something new is there to run. run: for ever; sweep: now and then."""

    store: BatchStore
    files: FileStore
    wake: Callable[[], None]
    figures: Figures
    run: Callable[[], Coroutine[Any, Any, None]]

    def sweep(self) -> None:
        """Delete what has been kept long enough, some at a time, until nothing more is due."""
        for sweep in (self.files.sweep, self.store.sweep):
            for _ in range(_ROUNDS_MAX):
                if not sweep():
                    break
