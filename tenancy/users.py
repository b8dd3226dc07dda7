"""Users: people who sign in. A user has one password and is a member of any number of accounts. Plain values."""

import re
import secrets
from dataclasses import dataclass

from tenancy.roles import Role

# One @, something before it, no spaces: what lies behind is the mail server's matter.
_EMAIL = re.compile(r"[^@\s]{1,64}@[^@\s]{1,189}")
USER_NAME_CHARACTERS_MAX = 100
PASSWORD_CHARACTERS_MIN = 12
PASSWORD_CHARACTERS_MAX = 256  # argon2 hashes any length; a body limit alone would allow megabytes


@dataclass(frozen=True, slots=True)
class User:
    """id: 32 lower-case hex. email: in lower case, how a user signs in. operator: sees the whole service.

    has_password: without one, only a one-time link lets the user in.
    """

    id: str
    email: str
    name: str
    operator: bool
    disabled: bool
    has_password: bool
    created_at_ns: int


@dataclass(frozen=True, slots=True)
class Member:
    """A user in an account."""

    account_id: str
    user: User
    role: Role


@dataclass(frozen=True, slots=True)
class Membership:
    """An account of a user."""

    account_id: str
    account_name: str
    role: Role


def new_user_id() -> str:
    return secrets.token_hex(16)


def normal_email(text: str) -> str | None:
    """As it is stored; None if it is no address."""
    email = text.strip().lower()
    return email if _EMAIL.fullmatch(email) and email.isprintable() else None
