"""Queries of users, members, sessions and one-time links, inside a connection that the caller opened.

Every method that belongs to an account takes its id first. Deeds use it (people.py, sign_in.py); routes do not.
"""

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tenancy.database import insert_missing
from tenancy.errors import MemberNotFound, NameTaken, UserNotFound
from tenancy.roles import Role
from tenancy.tables import accounts, memberships, one_time_links, sign_in_failures, user_sessions, users
from tenancy.users import Member, Membership, User

_USERS_LISTED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class OneTimeLink:
    """user_id: signs this user in; otherwise it makes whoever follows it a member of the account, with this role."""

    token_hash: str
    user_id: str | None
    account_id: str | None
    email: str | None
    role: Role | None
    created_at_ns: int
    expires_at_ns: int


@dataclass(frozen=True, slots=True)
class UserSession:
    token_hash: str
    user: User
    created_at_ns: int
    seen_at_ns: int


class PeopleStore:
    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    # Users.

    def add_user(self, user: User, password_hash: str | None) -> None:
        """Raises NameTaken: an email address is one user's."""
        taken = NameTaken(f"There is a user with the address {user.email} already.")
        if self._connection.scalar(sa.select(users.c.id).where(users.c.email == user.email)) is not None:
            raise taken
        row = {name: getattr(user, name) for name in User.__slots__ if name != "has_password"}
        try:
            self._connection.execute(users.insert(), row | {"password_hash": password_hash})
        except sa.exc.IntegrityError as error:  # another process took it in between
            raise taken from error

    def user(self, user_id: str) -> User:
        return self._one_user(users.c.id == user_id)

    def user_by_email(self, email: str) -> User:
        return self._one_user(users.c.email == email)

    def users(self) -> list[User]:
        query = sa.select(users).order_by(users.c.created_at_ns, users.c.id).limit(_USERS_LISTED_MAX)
        return [_user(row) for row in self._connection.execute(query).mappings()]

    def password_hash(self, user_id: str) -> str | None:
        return self._connection.scalar(sa.select(users.c.password_hash).where(users.c.id == user_id))

    def update_user(self, user_id: str, **values: Any) -> None:
        if self._connection.execute(users.update().where(users.c.id == user_id).values(**values)).rowcount == 0:
            raise UserNotFound("There is no such user.")

    def _one_user(self, which: sa.ColumnElement[bool]) -> User:
        row = self._connection.execute(sa.select(users).where(which)).mappings().first()
        if row is None:
            raise UserNotFound("There is no such user.")
        return _user(row)

    # Members.

    def members(self, account_id: str) -> list[Member]:
        query = (
            sa.select(users, memberships.c.role)
            .join(memberships, memberships.c.user_id == users.c.id)
            .where(memberships.c.account_id == account_id)
            .order_by(memberships.c.created_at_ns, users.c.id)
            .limit(_USERS_LISTED_MAX)
        )
        rows = self._connection.execute(query).mappings()
        return [Member(account_id, _user(row), Role(row["role"])) for row in rows]

    def role(self, account_id: str, user_id: str) -> Role | None:
        query = sa.select(memberships.c.role).where(
            memberships.c.account_id == account_id, memberships.c.user_id == user_id
        )
        role = self._connection.scalar(query)
        return None if role is None else Role(role)

    def has_another_owner(self, account_id: str, user_id: str) -> bool:
        """One who may sign in."""
        others = (
            sa.select(memberships.c.user_id)
            .join(users, users.c.id == memberships.c.user_id)
            .where(
                memberships.c.account_id == account_id,
                memberships.c.role == Role.OWNER.value,
                memberships.c.user_id != user_id,
                users.c.disabled.is_(False),
            )
        )
        return self._connection.scalar(others.limit(1)) is not None

    def set_member(self, account_id: str, user_id: str, role: Role, now_ns: int) -> None:
        row = {"account_id": account_id, "user_id": user_id, "role": role.value, "created_at_ns": now_ns}
        insert_missing(self._connection, memberships, [row])
        mine = sa.and_(memberships.c.account_id == account_id, memberships.c.user_id == user_id)
        self._connection.execute(memberships.update().where(mine).values(role=role.value))

    def remove_member(self, account_id: str, user_id: str) -> None:
        mine = sa.and_(memberships.c.account_id == account_id, memberships.c.user_id == user_id)
        if self._connection.execute(memberships.delete().where(mine)).rowcount == 0:
            raise MemberNotFound("There is no such member in this account.")

    def memberships(self, user_id: str) -> list[Membership]:
        query = (
            sa.select(memberships.c.account_id, accounts.c.name, memberships.c.role)
            .join(accounts, accounts.c.id == memberships.c.account_id)
            .where(memberships.c.user_id == user_id)
            .order_by(accounts.c.name)
            .limit(_USERS_LISTED_MAX)
        )
        return [Membership(row.account_id, row.name, Role(row.role)) for row in self._connection.execute(query)]

    # Sessions.

    def add_session(self, token_hash: str, user_id: str, now_ns: int) -> None:
        row = {"token_hash": token_hash, "user_id": user_id, "created_at_ns": now_ns, "seen_at_ns": now_ns}
        self._connection.execute(user_sessions.insert(), row)

    def session(self, token_hash: str) -> UserSession | None:
        query = (
            sa.select(users, user_sessions.c.created_at_ns.label("began_at_ns"), user_sessions.c.seen_at_ns)
            .join(users, users.c.id == user_sessions.c.user_id)
            .where(user_sessions.c.token_hash == token_hash)
        )
        row = self._connection.execute(query).mappings().first()
        return None if row is None else UserSession(token_hash, _user(row), row["began_at_ns"], row["seen_at_ns"])

    def note_seen(self, token_hash: str, now_ns: int) -> None:
        mine = user_sessions.c.token_hash == token_hash
        self._connection.execute(user_sessions.update().where(mine).values(seen_at_ns=now_ns))

    def end_session(self, token_hash: str) -> None:
        self._connection.execute(user_sessions.delete().where(user_sessions.c.token_hash == token_hash))

    def end_sessions(self, user_id: str, *, keep_newest: int = 0) -> None:
        query = (
            sa.select(user_sessions.c.token_hash)
            .where(user_sessions.c.user_id == user_id)
            .order_by(user_sessions.c.created_at_ns.desc(), user_sessions.c.token_hash)
            .offset(keep_newest)
        )
        ended = list(self._connection.scalars(query))
        self._connection.execute(user_sessions.delete().where(user_sessions.c.token_hash.in_(ended)))

    def sweep_sessions(self, *, seen_before_ns: int, began_before_ns: int) -> None:
        old = sa.or_(user_sessions.c.seen_at_ns < seen_before_ns, user_sessions.c.created_at_ns < began_before_ns)
        self._connection.execute(user_sessions.delete().where(old))

    # One-time links.

    def add_link(self, link: OneTimeLink) -> None:
        row = {name: getattr(link, name) for name in OneTimeLink.__slots__}
        self._connection.execute(one_time_links.insert(), row)

    def end_invitations(self, account_id: str | None = None) -> int:
        """Of one account, or of all; returns how many there were."""
        theirs = one_time_links.c.account_id
        which = theirs.is_not(None) if account_id is None else theirs == account_id
        return self._connection.execute(one_time_links.delete().where(which)).rowcount

    def count_invitations(self, account_id: str, now_ns: int) -> int:
        """Open ones."""
        query = (
            sa.select(sa.func.count())
            .select_from(one_time_links)
            .where(one_time_links.c.account_id == account_id, one_time_links.c.expires_at_ns > now_ns)
        )
        return self._connection.scalar(query) or 0

    def link(self, token_hash: str) -> OneTimeLink | None:
        query = sa.select(one_time_links).where(one_time_links.c.token_hash == token_hash)
        row = self._connection.execute(query).mappings().first()
        return (
            None if row is None else OneTimeLink(**{**row, "role": None if row["role"] is None else Role(row["role"])})
        )

    def use_link(self, token_hash: str) -> bool:
        """False if somebody else has used it: of two at once, one wins."""
        query = one_time_links.delete().where(one_time_links.c.token_hash == token_hash)
        return self._connection.execute(query).rowcount == 1

    def sweep_links(self, now_ns: int) -> None:
        self._connection.execute(one_time_links.delete().where(one_time_links.c.expires_at_ns <= now_ns))

    # Sign-in attempts.

    def count_attempt(self, subject_hash: str, now_ns: int) -> tuple[int, int]:
        """One more; returns how many there are, and since when."""
        row = {"subject_hash": subject_hash, "failures": 0, "since_ns": now_ns}
        insert_missing(self._connection, sign_in_failures, [row])
        mine = sign_in_failures.c.subject_hash == subject_hash
        update = sign_in_failures.update().where(mine).values(failures=sign_in_failures.c.failures + 1)
        counts = update.returning(sign_in_failures.c.failures, sign_in_failures.c.since_ns)
        found = self._connection.execute(counts).one()
        return found.failures, found.since_ns

    def uncount_attempt(self, subject_hash: str) -> None:
        mine = sign_in_failures.c.subject_hash == subject_hash
        self._connection.execute(sign_in_failures.update().where(mine).values(failures=sign_in_failures.c.failures - 1))

    def forget_attempts(self, subject_hash: str) -> None:
        self._connection.execute(sign_in_failures.delete().where(sign_in_failures.c.subject_hash == subject_hash))

    def sweep_attempts(self, since_before_ns: int) -> None:
        self._connection.execute(sign_in_failures.delete().where(sign_in_failures.c.since_ns <= since_before_ns))


def _user(row: sa.RowMapping) -> User:
    return User(
        id=row["id"],
        email=row["email"],
        name=row["name"],
        operator=row["operator"],
        disabled=row["disabled"],
        has_password=row["password_hash"] is not None,
        created_at_ns=row["created_at_ns"],
    )
