"""The open connections to PostgreSQL, to be cut at the end: a server that hangs lets no call end, and calls no process.

Used by database.py alone. Its statement timeout is the server's own, and what its kernel has taken is no trouble of the
network: nothing but the end of the connection wakes a thread that waits for its answer.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import sqlalchemy as sa
import structlog
from sqlalchemy import event

log = structlog.get_logger(__name__)


class OpenConnections:
    """Those of one engine. For any thread."""

    def __init__(self, engine: sa.Engine) -> None:
        self._open: set[Any] = set()
        # By the engine's own client: whoever serves from SQLite imports no other, which is a tenth of its start.
        self._over = (OSError, engine.dialect.loaded_dbapi.Error)
        event.listen(engine, "connect", lambda connection, _record: self._open.add(connection))
        event.listen(engine, "close", lambda connection, _record: self._open.discard(connection))

    @contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """A block that waits for calls: those that still run after so many seconds fail."""
        timer = threading.Timer(seconds, self._cut)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        log.warning("calls of the database are given up", connections=len(self._open))
        for connection in list(self._open):
            # A connection that ends meanwhile needs no end.
            with suppress(*self._over), socket.socket(fileno=os.dup(connection.fileno())) as way:
                way.shutdown(socket.SHUT_RDWR)
