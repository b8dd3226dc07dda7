"""Signing in and out: by password or one-time link, into sessions that end by themselves. The dashboard calls it.

A session is 256 random bits in the browser's cookie; only its SHA-256 is kept here, so that a copy of the database lets
nobody in. Each sign-in opens a new session, whatever cookie came with it; a new password ends all of them. Attempts are
counted before a password is compared, so that parallel guesses are bounded like any others.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network
from typing import Final

from tenancy import audit_log
from tenancy.audit_log import Actor, ActorKind
from tenancy.database import Database
from tenancy.errors import LinkInvalid, SignInRefused, SignInThrottled, UserNotFound
from tenancy.passwords import Passwords
from tenancy.people_store import OneTimeLink, PeopleStore, UserSession
from tenancy.principal import Address
from tenancy.users import PASSWORD_CHARACTERS_MAX, PASSWORD_CHARACTERS_MIN, User

_MINUTE_NS: Final = 60 * 1_000_000_000
_HOUR_NS: Final = 60 * _MINUTE_NS
SESSION_NS_MAX: Final = 7 * 24 * _HOUR_NS
SESSION_IDLE_NS_MAX: Final = 12 * _HOUR_NS
SESSIONS_MAX: Final = 10  # of one user; the oldest end first
_SEEN_NOTED_NS: Final = _MINUTE_NS
SIGN_IN_LINK_NS: Final = 15 * _MINUTE_NS

ATTEMPTS_NS: Final = 15 * _MINUTE_NS
# For one user from one address: people mistype. For one address: an office. For one user: a spread attack, which then
# also keeps the user out for a while; a one-time link still works.
ATTEMPTS_MAX: Final = {"user and address": 5, "address": 30, "user": 50}

_REFUSED: Final = "The address or the password is wrong."


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """token: for the cookie, and nowhere else."""

    token: str
    user: User

    def __repr__(self) -> str:  # a token in a log or a traceback would be a leak
        return f"OpenedSession({self.user.id})"


def new_token() -> str:
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Without a slow hash or salt: nobody guesses 256 bits."""
    return hashlib.sha256(token.encode()).hexdigest()


def form_token(session_token: str) -> str:
    """What a session's forms carry to show that they are its own pages': nobody can make it without the session."""
    return hmac.digest(session_token.encode(), b"pagegate form", "sha256").hex()


def password_fault(password: str) -> str | None:
    """What is wrong with a new password, as a sentence; None if nothing is."""
    if not PASSWORD_CHARACTERS_MIN <= len(password) <= PASSWORD_CHARACTERS_MAX:
        return f"A password has {PASSWORD_CHARACTERS_MIN} to {PASSWORD_CHARACTERS_MAX} characters."
    if len(set(password)) < PASSWORD_CHARACTERS_MIN // 2:
        return "This password repeats too few characters."
    return None


class SignIns:
    def __init__(self, database: Database, passwords: Passwords, *, clock: Callable[[], int]) -> None:
        self._database = database
        self._passwords = passwords
        self._clock = clock

    async def with_password(self, email: str, password: str, address: Address | None) -> OpenedSession:
        """Raises SignInRefused, the same for every reason, or SignInThrottled."""
        email = email.strip().lower()[:254]
        subjects = _subjects(email, address)
        await self._database.call(self._count, subjects)
        found = await self._database.call(self._find_user, email)
        kept = None if found is None else found[1]
        if not await self._passwords.matches(password[:PASSWORD_CHARACTERS_MAX], kept) or found is None:
            raise SignInRefused(_REFUSED)
        return await self._database.call(self._open, found[0], "password", subjects)

    async def with_link(self, token: str) -> OpenedSession:
        """Raises LinkInvalid."""
        return await self._database.call(self._use_link, token)

    async def for_new_user(self, user: User) -> OpenedSession:
        """For who has just set a first password by an invitation."""
        return await self._database.call(self._open, user, "invitation", {})

    async def hash_password(self, password: str) -> str:
        """Raises SignInThrottled."""
        return await self._passwords.hash(password)

    async def find(self, token: str) -> UserSession | None:
        """The session of a cookie, if it still lasts and its user may sign in."""
        return await self._database.call(self._find_session, hash_token(token))

    async def close(self, token: str) -> None:
        await self._database.call(self._close, hash_token(token))

    async def change_password(self, user: User, old: str, new: str) -> None:
        """All of the user's sessions end, this one too. Raises SignInRefused or SignInThrottled.

        old: not asked for where there is none yet.
        """
        found = await self._database.call(self._find_user, user.email)
        kept = None if found is None else found[1]
        if kept is not None:
            await self._database.call(self._count, _subjects(f"password of {user.id}", None))
            if not await self._passwords.matches(old[:PASSWORD_CHARACTERS_MAX], kept):
                raise SignInRefused("The old password is wrong.")
        assert password_fault(new) is None, "whoever takes a new password checks it first"
        new_hash = await self._passwords.hash(new)
        await self._database.call(self._set_password, user.id, new_hash)

    def _set_password(self, user_id: str, password_hash: str) -> None:
        with self._database.write() as connection:
            store = PeopleStore(connection)
            store.update_user(user_id, password_hash=password_hash)
            store.end_sessions(user_id)
            audit_log.record(
                connection,
                at_ns=self._clock(),
                by=Actor(ActorKind.USER, user_id),
                account_id=None,
                action="user.set_password",
                subject=user_id,
            )

    def _count(self, subjects: dict[str, str]) -> None:
        now_ns = self._clock()
        refused_since_ns: int | None = None
        with self._database.write() as connection:
            store = PeopleStore(connection)
            store.sweep_attempts(now_ns - ATTEMPTS_NS)
            for kind, subject in subjects.items():
                attempts, since_ns = store.count_attempt(subject, now_ns)
                if attempts > ATTEMPTS_MAX[kind]:
                    refused_since_ns = since_ns
                    break
        if refused_since_ns is not None:
            wait_s = max(1, (refused_since_ns + ATTEMPTS_NS - now_ns) // 1_000_000_000)
            raise SignInThrottled("Too many attempts to sign in. Try again later.", retry_after_s=wait_s)

    def _find_user(self, email: str) -> tuple[User, str | None] | None:
        with self._database.read() as connection:
            store = PeopleStore(connection)
            try:
                user = store.user_by_email(email)
            except UserNotFound:
                return None
            return None if user.disabled else (user, store.password_hash(user.id))

    def _open(self, user: User, how: str, subjects: dict[str, str]) -> OpenedSession:
        token, now_ns = new_token(), self._clock()
        with self._database.write() as connection:
            store = PeopleStore(connection)
            for kind, subject in subjects.items():
                if kind == "user and address":
                    store.forget_attempts(subject)
                else:
                    store.uncount_attempt(subject)
            store.sweep_sessions(seen_before_ns=now_ns - SESSION_IDLE_NS_MAX, began_before_ns=now_ns - SESSION_NS_MAX)
            store.end_sessions(user.id, keep_newest=SESSIONS_MAX - 1)
            store.add_session(hash_token(token), user.id, now_ns)
            audit_log.record(
                connection,
                at_ns=now_ns,
                by=Actor(ActorKind.USER, user.id),
                account_id=None,
                action="user.sign_in",
                subject=user.id,
                how=how,
            )
        return OpenedSession(token, user)

    def _use_link(self, token: str) -> OpenedSession:
        invalid = LinkInvalid("This link was used already, has expired, or never was.")
        with self._database.write() as connection:
            store = PeopleStore(connection)
            link = store.link(hash_token(token))
            if link is None or link.user_id is None or link.expires_at_ns <= self._clock():
                raise invalid
            user = store.user(link.user_id)
            if not store.use_link(link.token_hash) or user.disabled:
                raise invalid
        return self._open(user, "link", {})

    def _find_session(self, token_hash: str) -> UserSession | None:
        now_ns = self._clock()
        with self._database.read() as connection:
            session = PeopleStore(connection).session(token_hash)
        if session is None or session.user.disabled:
            return None
        if now_ns - session.created_at_ns >= SESSION_NS_MAX or now_ns - session.seen_at_ns >= SESSION_IDLE_NS_MAX:
            return None
        if now_ns - session.seen_at_ns >= _SEEN_NOTED_NS:
            with self._database.write() as connection:
                PeopleStore(connection).note_seen(token_hash, now_ns)
        return session

    def _close(self, token_hash: str) -> None:
        with self._database.write() as connection:
            PeopleStore(connection).end_session(token_hash)


def make_sign_in_link(database: Database, user: User, *, by: Actor, clock: Callable[[], int]) -> str:
    """The token of a link that signs the user in, once, within a quarter of an hour."""
    token, now_ns = new_token(), clock()
    with database.write() as connection:
        store = PeopleStore(connection)
        store.sweep_links(now_ns)
        store.add_link(OneTimeLink(hash_token(token), user.id, None, None, None, now_ns, now_ns + SIGN_IN_LINK_NS))
        audit_log.record(connection, at_ns=now_ns, by=by, account_id=None, action="user.make_link", subject=user.id)
    return token


def find_link(database: Database, token: str, *, clock: Callable[[], int]) -> OneTimeLink:
    """What a link would do, without using it. Raises LinkInvalid."""
    with database.read() as connection:
        link = PeopleStore(connection).link(hash_token(token))
    if link is None or link.expires_at_ns <= clock():
        raise LinkInvalid("This link was used already, has expired, or never was.")
    return link


def _subjects(email: str, address: Address | None) -> dict[str, str]:
    """What attempts are counted by, the widest last. Hashed: the table is no list of who tried to sign in."""
    place = _network_of(address)
    texts = {"user and address": f"{email}|{place}", "address": place, "user": email}
    return {kind: hash_token(f"{kind}|{text}") for kind, text in texts.items()}


def _network_of(address: Address | None) -> str:
    """An IPv6 network of 64 bits is one customer's: each could try from 2^64 addresses."""
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)
