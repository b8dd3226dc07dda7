"""The audit log over both databases: one chain whoever writes, and every way to alter it is seen."""

import threading

import pytest
import sqlalchemy as sa

from tenancy import provisioning
from tenancy.audit_log import COMMAND_LINE, Actor, ActorKind, read_audit_log, record, verify
from tenancy.database import Database
from tenancy.keys import KeyKind
from tenancy.tables import audit_log
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import PEPPER, over_both_databases

pytestmark = over_both_databases

_KEY = Actor(ActorKind.KEY, "k" * 32)


def _write(database: Database, count: int, account_id: str | None = None) -> None:
    for number in range(count):
        with database.write() as connection:
            record(
                connection,
                at_ns=number,
                by=_KEY,
                account_id=account_id,
                action="a.b",
                subject="s",
                detail_number=number,
            )


def test_entries_are_read_newest_first_a_page_at_a_time_and_by_account(database: Database) -> None:
    _write(database, 3, "a" * 32)
    _write(database, 2, "b" * 32)
    newest = read_audit_log(database, None, limit=2)
    assert [entry.number for entry in newest] == [5, 4]
    assert [entry.number for entry in read_audit_log(database, None, before=4)] == [3, 2, 1]
    assert [entry.number for entry in read_audit_log(database, "a" * 32)] == [3, 2, 1]


def test_an_untouched_chain_is_whole_and_its_head_can_be_noted(database: Database) -> None:
    assert verify(database).head is None
    _write(database, 3)
    first = verify(database)
    assert (first.entries, first.broken) == (3, ())
    _write(database, 1)
    assert verify(database, first.head).broken == ()


@pytest.mark.parametrize("column", ["at_ns", "account_id", "actor_id", "action", "subject", "detail"])
def test_a_changed_entry_is_seen(database: Database, column: str) -> None:
    _write(database, 3)
    with database.write() as connection:
        connection.execute(audit_log.update().where(audit_log.c.number == 2).values({column: "9"}))
    assert verify(database).broken == ("entry 2 was changed",)


def test_a_removed_entry_is_seen(database: Database) -> None:
    _write(database, 3)
    with database.write() as connection:
        connection.execute(audit_log.delete().where(audit_log.c.number == 2))
    assert verify(database).broken == ("entries 2 to 2 are missing",)


def test_a_cut_end_is_seen_by_whoever_noted_it(database: Database) -> None:
    _write(database, 3)
    noted = verify(database).head
    with database.write() as connection:
        connection.execute(audit_log.delete().where(audit_log.c.number == 3))
    assert verify(database).broken == ()
    assert verify(database, noted).broken == ("the entry that was noted is missing",)


def test_a_chain_that_was_written_anew_is_seen_by_whoever_noted_it(database: Database) -> None:
    _write(database, 3)
    noted = verify(database).head
    with database.write() as connection:
        connection.execute(sa.delete(audit_log))
    _write(database, 3, "f" * 32)
    assert verify(database).broken == ()
    assert verify(database, noted).broken == ("entry 3 is not the one that was noted",)


def test_writers_at_once_make_one_chain(database: Database) -> None:
    threads = [threading.Thread(target=_write, args=(database, 10)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    verdict = verify(database)
    assert (verdict.entries, verdict.broken) == (40, ())


def test_what_was_refused_was_not_logged(database: Database, clock: SettableClock) -> None:
    account = provisioning.open_account(database, "acme", clock=clock)
    before = verify(database).entries
    with pytest.raises(provisioning.ProvisioningInvalid):
        provisioning.issue_key(database, PEPPER, account.id, name="", kind=KeyKind.INFERENCE, clock=clock)
    assert verify(database).entries == before


def test_each_deed_on_keys_is_one_entry_without_the_keys_text(database: Database, clock: SettableClock) -> None:
    account = provisioning.open_account(database, "acme", clock=clock)
    issued = provisioning.issue_key(
        database, PEPPER, account.id, name="ci", kind=KeyKind.INFERENCE, by=_KEY, clock=clock
    )
    rotated = provisioning.rotate_key(database, PEPPER, account.id, issued.key.id, grace_s=60, by=_KEY, clock=clock)
    provisioning.set_key_disabled(database, account.id, rotated.key.id, disabled=True, by=_KEY, clock=clock)
    for _ in range(2):  # revoking again changes nothing, so it is no entry
        provisioning.revoke_key(database, account.id, rotated.key.id, by=_KEY, clock=clock)
    entries = read_audit_log(database, account.id)[::-1]
    assert [entry.action for entry in entries] == [
        "account.open",
        "key.issue",
        "key.rotate",
        "key.disable",
        "key.revoke",
    ]
    assert {entry.actor_kind for entry in entries[:1]} == {COMMAND_LINE.kind}
    assert {entry.actor_id for entry in entries[1:]} == {_KEY.id}
    told = repr(entries)
    for secret in (issued.text, rotated.text, issued.key.key_hash):
        assert secret not in told
    assert issued.key.hint in entries[1].detail
