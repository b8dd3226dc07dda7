"""The audit log: who changed what, and when, in an order that can't be altered unseen.

Each entry holds the hash of the one before it, so that a changed, removed or inserted entry breaks the chain; whoever
noted a number with its hash can also tell that nothing behind it was rewritten. Deeds write an entry as the last thing
of their own transaction: what was not logged did not happen. Entries name ids, never secrets.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import orjson
import sqlalchemy as sa

from tenancy.database import Database, beyond_the_wall, note_deed, take_turn
from tenancy.tables import audit_log

_TURN: Final = 0x7067_6175  # an arbitrary, fixed number: "pgau"
_PAGE_MAX: Final = 1_000
_BROKEN_TOLD_MAX: Final = 100
_NO_HASH: Final = "0" * 64


class ActorKind(StrEnum):
    USER = "user"
    KEY = "key"
    COMMAND_LINE = "command line"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did it. id: of the user or the key; empty for the command line and the service itself."""

    kind: ActorKind
    id: str = ""


COMMAND_LINE: Final = Actor(ActorKind.COMMAND_LINE)
SERVICE: Final = Actor(ActorKind.SERVICE)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """account_id: None for what is about the service as a whole. action: such as `key.revoke`, done to `subject`."""

    number: int
    at_ns: int
    account_id: str | None
    actor_kind: str
    actor_id: str
    action: str
    subject: str
    detail: str
    previous_hash: str
    hash: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """entries: how many there are. head: number and hash of the newest. broken: what does not fit, as sentences."""

    entries: int
    head: tuple[int, str] | None
    broken: tuple[str, ...]


def wait_turn(connection: sa.Connection) -> None:
    """Keep others from adding entries until this transaction ends: for one that adds several, and, as the first thing
    that it does, for one that decides by what other deeds change.
    """
    take_turn(connection, _TURN)


def record(
    connection: sa.Connection,
    *,
    at_ns: int,
    by: Actor,
    account_id: str | None,
    action: str,
    subject: str,
    **detail: str | int | bool | None,
) -> None:
    """Add an entry in the caller's write transaction; others that would add one wait until it ends, so do it last."""
    wait_turn(connection)
    note_deed(connection)
    with beyond_the_wall(connection):  # the chain is one for all accounts
        newest = sa.select(audit_log.c.number, audit_log.c.hash).order_by(audit_log.c.number.desc()).limit(1)
        before = connection.execute(newest).first()
        number, previous_hash = (1, _NO_HASH) if before is None else (before.number + 1, before.hash)
        text = orjson.dumps(detail, option=orjson.OPT_SORT_KEYS).decode()
        values = (number, at_ns, account_id, by.kind.value, by.id, action, subject, text, previous_hash)
        entry = AuditEntry(*values, _hash(values))
        connection.execute(audit_log.insert(), {name: getattr(entry, name) for name in AuditEntry.__slots__})


def read_audit_log(
    database: Database, account_id: str | None, limit: int = 50, before: int | None = None
) -> list[AuditEntry]:
    """Newest first. account_id: None for all accounts' and the service's. before: the last number seen."""
    query = sa.select(audit_log).order_by(audit_log.c.number.desc()).limit(min(max(limit, 1), _PAGE_MAX))
    if account_id is not None:
        query = query.where(audit_log.c.account_id == account_id)
    if before is not None:
        query = query.where(audit_log.c.number < before)
    with database.read() as connection:
        return [AuditEntry(**row) for row in connection.execute(query).mappings()]


def verify(database: Database, known: tuple[int, str] | None = None) -> Verdict:
    """Walk the whole chain. known: a number and its hash as noted earlier, which must still stand."""
    entries, expected, head = 0, 1, None
    previous_hash, broken = _NO_HASH, []
    seen_known = known is None
    for entry in _all(database):
        entries += 1
        values = tuple(getattr(entry, name) for name in AuditEntry.__slots__)[:-1]
        if entry.number != expected:
            broken.append(f"entries {expected} to {entry.number - 1} are missing")
        elif entry.previous_hash != previous_hash:
            broken.append(f"entry {entry.number} does not continue the one before it")
        if entry.hash != _hash(values):
            broken.append(f"entry {entry.number} was changed")
        if known is not None and entry.number == known[0]:
            seen_known = True
            if entry.hash != known[1]:
                broken.append(f"entry {entry.number} is not the one that was noted")
        expected, previous_hash, head = entry.number + 1, entry.hash, (entry.number, entry.hash)
    if not seen_known:
        broken.append("the entry that was noted is missing")
    return Verdict(entries, head, tuple(broken[:_BROKEN_TOLD_MAX]))


def _all(database: Database) -> Iterator[AuditEntry]:
    last = 0
    while True:
        query = sa.select(audit_log).where(audit_log.c.number > last).order_by(audit_log.c.number).limit(_PAGE_MAX)
        with database.read() as connection:
            page = [AuditEntry(**row) for row in connection.execute(query).mappings()]
        yield from page
        if len(page) < _PAGE_MAX:
            return
        last = page[-1].number


def _hash(values: tuple[object, ...]) -> str:
    return hashlib.sha256(orjson.dumps(values)).hexdigest()
