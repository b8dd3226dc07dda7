"""The place of a data folder: whose engine processes are whose. Used where engines are started, before a port is taken,
and by the operator's commands.

One process at a time serves from a folder, or supervises those that do, and starts its engines: it holds a lock that
the kernel frees when it dies, however it does. So whoever has the lock knows that nobody else looks after the units of
this place any more.
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
    """Another process serves from this data folder."""


@contextmanager
def own_place(home: Path) -> Iterator[str]:
    """Its id, kept in the folder. Raises PlaceInUse."""
    path = home / "engines.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PlaceInUse(error.errno, "Another process serves from this data folder", str(home)) from error
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


def is_left(home: Path) -> bool:
    """Somebody served from it, and nobody does now: workers of a supervisor that was killed may still be ending.

    A process that takes the place in this very instant may be told that it is in use.
    """
    try:
        descriptor = os.open(home / "engines.lock", os.O_RDWR)
    except OSError:  # nobody did, or the folder can't be used
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
