"""API keys: their text, their checksum, and the hash that is kept in their place. Pure, but for drawing random ones.

    pgi_live_<40 base62><6 base62>
      │    │        │        └ CRC32 of all that precedes: a mistyped key is refused without a look-up
      │    │        └ 238 random bits
      │    └ environment
      └ kind: pgi infers, pga administers

Only HMAC-SHA-256 of the text under a pepper is stored, and the pepper is not in the database: a copy of the database
lets nobody in. A slow hash is no help against guessing 238 bits, and would be a cheap way to keep the service busy.
"""

import hmac
import re
import secrets
import zlib
from dataclasses import dataclass
from enum import StrEnum

from tenancy.errors import KeyMalformed, KeyMissing
from tenancy.principal import OPERATOR_SCOPES, Network, Scope

_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_RANDOM_CHARACTERS = 40
_CHECKSUM_CHARACTERS = 6
_KEY = re.compile(rf"pg[ia]_live_[0-9A-Za-z]{{{_RANDOM_CHARACTERS + _CHECKSUM_CHARACTERS}}}", re.ASCII)

PEPPER_BYTES = 32


class KeyKind(StrEnum):
    INFERENCE = "inference"
    ADMIN = "admin"


_LIKE_A_KEY = re.compile(r"(pg[ia]_live_)[0-9A-Za-z]+", re.ASCII)
_PREFIXES = {KeyKind.INFERENCE: "pgi_live_", KeyKind.ADMIN: "pga_live_"}

# Admin keys can't infer and inference keys can't administer, so that a leaked one does half the harm.
ALLOWED_SCOPES = {
    KeyKind.INFERENCE: frozenset({Scope.AI_RUN, Scope.AI_READ, Scope.USAGE_READ}),
    KeyKind.ADMIN: frozenset({Scope.AI_READ, Scope.USAGE_READ, Scope.ACCOUNT_ADMIN}) | OPERATOR_SCOPES,
}

# What a key has if nothing is said: an operator's view of every account is asked for by name.
USUAL_SCOPES = {kind: scopes - OPERATOR_SCOPES for kind, scopes in ALLOWED_SCOPES.items()}


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key: never its text. id is public; hint is enough to recognise it by (`pgi_live_…Xy3Q`).

    lineage_id: the first of the keys that were rotated into this one, its own id if none was; limits are the lineage's.
    models, networks: what it may use, and from where; None: anything, from anywhere. project_id: None for the account's
    default project; a key stays in its project. service_account_id: the program that owns it, None if people use it.
    """

    id: str
    account_id: str
    name: str
    kind: KeyKind
    key_hash: str
    hint: str
    scopes: frozenset[Scope]
    created_at_ns: int
    expires_at_ns: int | None = None
    revoked_at_ns: int | None = None
    disabled: bool = False
    lineage_id: str | None = None
    models: tuple[str, ...] | None = None
    networks: tuple[Network, ...] | None = None
    last_used_at_ns: int | None = None
    project_id: str | None = None
    service_account_id: str | None = None

    @property
    def lineage(self) -> str:
        return self.lineage_id or self.id

    @property
    def project(self) -> str:
        """The project's id: the account's for its default one."""
        return self.project_id or self.account_id

    def __post_init__(self) -> None:
        assert self.scopes <= ALLOWED_SCOPES[self.kind], f"scopes {self.scopes} are not for {self.kind} keys"


def new_key_id() -> str:
    return secrets.token_hex(16)


def new_key_text(kind: KeyKind) -> str:
    """A fresh random key: shown once, then only its hash is known."""
    body = _PREFIXES[kind] + "".join(secrets.choice(_BASE62) for _ in range(_RANDOM_CHARACTERS))
    return body + checksum(body)


def without_keys(text: str) -> str:
    """The text with whatever looks like a key cut short: a key that was sent where a name belongs is not repeated."""
    return _LIKE_A_KEY.sub(r"\1…", text)


def checksum(body: str) -> str:
    """CRC32 of all that precedes it, as six base62 digits."""
    value = zlib.crc32(body.encode())
    digits = ""
    for _ in range(_CHECKSUM_CHARACTERS):
        value, digit = divmod(value, 62)
        digits = _BASE62[digit] + digits
    return digits


def check_format(token: str | None) -> str:
    """The token, if it can be a key at all. Raises KeyMissing or KeyMalformed before any look-up."""
    if not token:
        raise KeyMissing("No API key was given. Send it as 'Authorization: Bearer <key>'.")
    if _KEY.fullmatch(token) is None:
        raise KeyMalformed("The API key has not the form of a key of this service.")
    if checksum(token[:-_CHECKSUM_CHARACTERS]) != token[-_CHECKSUM_CHARACTERS:]:
        raise KeyMalformed("The API key is mistyped or cut short: its checksum does not match.")
    return token


def hash_key(text: str, pepper: bytes) -> str:
    assert len(pepper) == PEPPER_BYTES, "the pepper is 32 random bytes"
    return hmac.digest(pepper, text.encode(), "sha256").hex()


def hint(text: str) -> str:
    return f"{text[:9]}…{text[-4:]}"
