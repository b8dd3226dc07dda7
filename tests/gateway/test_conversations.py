"""Kept conversations: the account's own, for a time, in a bounded number, and gone when they are deleted."""

import pytest

from gateway.conversations import Conversation, Conversations
from gateway.errors import AnswerUnknown
from tenancy.database import Database
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

ME, OTHER = "a" * 32, "b" * 32
SAID = Conversation(b'[{"role":"user"}]', b'{"id":"1"}')


@pytest.fixture
def kept(database: Database, clock: SettableClock) -> Conversations:
    return Conversations(database, clock=clock, kept_s=60, bytes_max=100, per_account_max=3, account_bytes_max=250)


def test_it_is_the_accounts_own(kept: Conversations) -> None:
    kept.keep(ME, "1", SAID)
    assert kept.get(ME, "1") == SAID
    with pytest.raises(AnswerUnknown):
        kept.get(OTHER, "1")
    with pytest.raises(AnswerUnknown):
        kept.delete(OTHER, "1")
    kept.delete(ME, "1")
    with pytest.raises(AnswerUnknown):
        kept.get(ME, "1")


def test_it_ends_with_its_time_and_is_then_swept(kept: Conversations, clock: SettableClock) -> None:
    kept.keep(ME, "1", SAID)
    clock.advance_s(59)
    assert kept.sweep() == 0
    assert kept.get(ME, "1") == SAID
    clock.advance_s(1)
    with pytest.raises(AnswerUnknown):
        kept.get(ME, "1")
    assert kept.sweep() == 1


def test_the_oldest_makes_room_for_the_newest_of_its_account_alone(kept: Conversations, clock: SettableClock) -> None:
    kept.keep(OTHER, "0", SAID)
    for number in range(5):
        clock.advance_s(1)
        kept.keep(ME, str(number), SAID)
    for lost in ("0", "1"):
        with pytest.raises(AnswerUnknown):
            kept.get(ME, lost)
    assert [kept.get(ME, left) for left in ("2", "3", "4")] == [SAID] * 3
    assert kept.get(OTHER, "0") == SAID


def test_the_oldest_makes_room_where_an_accounts_bytes_are_all_taken(kept: Conversations, clock: SettableClock) -> None:
    for account in (ME, OTHER):
        for number in range(3):
            clock.advance_s(1)
            kept.keep(account, str(number), Conversation(b"x" * 40, b"y" * (60 if account == ME else 40)))
    with pytest.raises(AnswerUnknown):
        kept.get(ME, "0")
    assert [len(kept.get(ME, left).answer) for left in ("1", "2")] == [60, 60]
    assert kept.get(OTHER, "0").turns == b"x" * 40


def test_what_is_too_large_does_not_fit(kept: Conversations) -> None:
    assert kept.fits(Conversation(b"x" * 50, b"y" * 50))
    assert not kept.fits(Conversation(b"x" * 50, b"y" * 51))
