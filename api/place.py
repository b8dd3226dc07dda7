"""The place of a data folder: whose engine processes are whose. Used where engines are started, and by the operator's
commands.

One process at a time starts engines for a folder: it holds a lock that the kernel frees when it dies, however it does.
So whoever has the lock knows that nobody else looks after the units of this place any more.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_ID_BYTES: Final = 8


class PlaceInUse(OSError):
    """Another process starts the engines of this data folder."""


@contextmanager
def own_place(home: Path) -> Iterator[str]:
    """Its id, kept in the folder. Raises PlaceInUse."""
    path = home / "engines.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PlaceInUse(error.errno, "Another process starts engines for this data folder", str(home)) from error
        found = os.pread(descriptor, 2 * _ID_BYTES, 0).decode()
        if len(found) < 2 * _ID_BYTES:
            found = secrets.token_hex(_ID_BYTES)
            os.pwrite(descriptor, found.encode(), 0)
            os.fsync(descriptor)
        yield found
    finally:
        os.close(descriptor)


def place_of(home: Path) -> str:
    """As its owner calls it; empty where nobody has started an engine yet."""
    try:
        return (home / "engines.lock").read_text()[: 2 * _ID_BYTES]
    except FileNotFoundError:
        return ""
