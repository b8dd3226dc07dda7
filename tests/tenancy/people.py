"""Accounts and users for the tests of people, their sessions and the audit log. Hashes here cost next to nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

from tenancy import people, provisioning
from tenancy.audit_log import COMMAND_LINE
from tenancy.database import Database
from tenancy.passwords import HashCost, Passwords
from tenancy.users import User
from tests.tenancy.clock import SettableClock

PASSWORD = "a horse, a battery"


@contextmanager
def cheap_passwords() -> Iterator[Passwords]:
    passwords = Passwords(HashCost(memory_kib=8, passes=1))
    yield passwords
    passwords.close()


def open_account(database: Database, clock: SettableClock, name: str = "acme") -> str:
    return provisioning.open_account(database, name, clock=clock).id


def add_user(
    database: Database,
    clock: SettableClock,
    email: str = "ann@example.com",
    *,
    operator: bool = False,
    with_password: bool = False,
) -> User:
    password_hash = None
    if with_password:
        with cheap_passwords() as passwords:
            password_hash = passwords.hash_now(PASSWORD)
    return people.add_user(
        database,
        email=email,
        name=email.split("@", maxsplit=1)[0].title(),
        password_hash=password_hash,
        operator=operator,
        by=COMMAND_LINE,
        clock=clock,
    )
