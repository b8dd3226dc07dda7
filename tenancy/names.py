"""Names that are one's alone in an account: of projects and of service accounts."""

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from tenancy.errors import NameTaken


def name_taken(what: str, name: str) -> NameTaken:
    return NameTaken(f"A {what} named {name!r} exists already in this account.")


@contextmanager
def taken_named(what: str, name: str) -> Iterator[None]:
    """Names what a database says of two who take one name at once. Raises NameTaken."""
    try:
        yield
    except sa.exc.IntegrityError as error:
        raise name_taken(what, name) from error
