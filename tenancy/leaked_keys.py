"""Keys that were found where they don't belong: revoked for good, and the account's audit log says where.

The console's route for secret scanners calls it, after it has checked who speaks. A text that is no key of ours changes
nothing and costs one look-up at most: its checksum is tested first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tenancy import audit_log
from tenancy.audit_log import SERVICE
from tenancy.database import Database
from tenancy.errors import KeyRefused
from tenancy.keys import check_format, hash_key
from tenancy.people_store import PeopleStore
from tenancy.principal import Scope
from tenancy.store import TenancyStore

_FOUND_AT_CHARACTERS_MAX = 500


@dataclass(frozen=True, slots=True)
class Finding:
    """text: what looks like a key. found_at: the scanner's word on where, such as a URL; it is not trusted."""

    text: str
    found_at: str

    def __repr__(self) -> str:  # a key in a log or a traceback would be a leak once more
        return "Finding()"


def revoke_leaked(
    database: Database, pepper: bytes, findings: Sequence[Finding], *, clock: Callable[[], int]
) -> list[bool]:
    """Which of the findings are keys of ours, in their order: none of them works any more."""
    with database.write() as connection:
        audit_log.wait_turn(connection)  # as revoke_key
        return [_revoke(connection, pepper, finding, clock()) for finding in findings]


def _revoke(connection: sa.Connection, pepper: bytes, finding: Finding, now_ns: int) -> bool:
    try:
        key_hash = hash_key(check_format(finding.text), pepper)
    except KeyRefused:
        return False
    store = TenancyStore(connection)
    bearer = store.bearer(key_hash)
    if bearer is None:
        return False
    key = bearer.key
    if key.revoked_at_ns is None:
        store.update_key(key.account_id, key.id, revoked_at_ns=now_ns)
        if Scope.ACCOUNT_ADMIN in key.scopes:
            PeopleStore(connection).end_invitations(key.account_id)  # as revoke_key
        # The scanner may have found the key in the address itself.
        found_at = finding.found_at.replace(finding.text, key.hint)[:_FOUND_AT_CHARACTERS_MAX]
        audit_log.record(
            connection,
            at_ns=now_ns,
            by=SERVICE,
            account_id=key.account_id,
            action="key.revoke",
            subject=key.id,
            reason="found by a secret scanner",
            found_at="".join(character for character in found_at if character.isprintable()),
        )
    return True
