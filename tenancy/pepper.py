"""The pepper: 32 random bytes in a file of their own, outside the database, under which keys are hashed.

Opened by the composition root and the command line. Whoever loses it must issue every key anew.
"""

import errno
import os
import secrets
from pathlib import Path

import sqlalchemy as sa

from tenancy.database import Database
from tenancy.keys import PEPPER_BYTES
from tenancy.tables import api_keys


class PepperInvalid(OSError):
    """The pepper's file does not hold a pepper. The message names the file, never its content."""


def open_pepper(path: Path) -> bytes:
    """Read the pepper, and make it first (mode 0600) if there is none. Two processes at once get the same one."""
    if not path.exists():
        _create(path)
    pepper = path.read_bytes()
    if len(pepper) != PEPPER_BYTES:
        raise PepperInvalid(errno.EINVAL, f"Not a pepper of {PEPPER_BYTES} bytes: restore it from a copy", str(path))
    return pepper


def open_pepper_of(database: Database, path: Path) -> bytes:
    """As open_pepper, but none is made for a database that has keys: none of them would be known under a new one.

    Raises PepperInvalid. For whoever starts with a data folder that may be new, or not the one that was meant.
    """
    # Keys are younger than their pepper: where there are some, another first start has put it there by now.
    if not path.exists() and _has_keys(database) and not path.exists():
        raise PepperInvalid(
            errno.ENOENT,
            "The database has keys, and the pepper they were made with is not here: restore it from a copy, or put "
            "32 random bytes there and issue every key anew",
            str(path),
        )
    return open_pepper(path)


def _has_keys(database: Database) -> bool:
    with database.read() as connection:
        return bool(connection.scalar(sa.select(sa.exists(sa.select(api_keys.c.id)))))


def _create(path: Path) -> None:
    # Written aside and linked into place: nobody ever reads half a pepper, and the first of two processes wins.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(PEPPER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
