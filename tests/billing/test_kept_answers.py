"""Kept answers: one key, one request; gone after their time, and never another account's."""

import itertools

import pytest

from billing.errors import AnswerNotKept, IdempotencyMismatch, RequestRunning
from billing.kept_answers import KeptAnswer, KeptAnswers
from billing.tables import idempotency_records
from tenancy.database import Database
from tests.billing.builders import ACCOUNT, OTHER_ACCOUNT
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

ANSWER = KeptAnswer(200, {"content-type": "application/json"}, b'{"a":"\xc3\xa9"}')


@pytest.fixture
def kept(database: Database, clock: SettableClock) -> KeptAnswers:
    return KeptAnswers(
        database, clock=clock, kept_s=60, answer_bytes_max=100, keys_per_account_max=3, account_bytes_max=250
    )


_numbers = itertools.count()


def _begin(
    kept: KeptAnswers, key: str = "k", account: str = ACCOUNT, print_: str = "f", request_id: str | None = None
) -> KeptAnswer | None:
    """Every request has an id of its own; where it matters it is given."""
    return kept.begin(account, key, print_, request_id or f"other {next(_numbers)}")


def test_a_new_key_is_taken_and_its_request_is_then_running(kept: KeptAnswers) -> None:
    assert _begin(kept, request_id="r1") is None
    with pytest.raises(RequestRunning, match="r1"):
        _begin(kept)
    assert _begin(kept, account=OTHER_ACCOUNT) is None


def test_an_answer_is_given_again_byte_for_byte(kept: KeptAnswers) -> None:
    _begin(kept, request_id="r1")
    kept.keep(ACCOUNT, "k", "r1", ANSWER)
    assert [_begin(kept) for _ in range(3)] == [ANSWER] * 3


def test_another_request_under_the_same_key_is_refused_whatever_its_state(kept: KeptAnswers) -> None:
    _begin(kept, request_id="r1")
    for _ in range(2):
        with pytest.raises(IdempotencyMismatch):
            _begin(kept, print_="another")
        kept.keep(ACCOUNT, "k", "r1", ANSWER)


def test_what_ended_without_an_answer_is_not_run_again(kept: KeptAnswers) -> None:
    _begin(kept, request_id="r1")
    kept.end(ACCOUNT, "k", "r1")
    with pytest.raises(AnswerNotKept, match="r1"):
        _begin(kept)


def test_an_answer_that_is_too_large_only_ends_it(kept: KeptAnswers) -> None:
    _begin(kept, request_id="r1")
    kept.keep(ACCOUNT, "k", "r1", KeptAnswer(200, {}, b"x" * 101))
    with pytest.raises(AnswerNotKept):
        _begin(kept)


def test_what_was_refused_may_try_again(kept: KeptAnswers) -> None:
    _begin(kept, request_id="r1")
    kept.forget(ACCOUNT, "k", "r1")
    assert _begin(kept) is None


def test_a_late_word_about_an_earlier_request_changes_nothing(kept: KeptAnswers) -> None:
    _begin(kept, request_id="r1")
    kept.forget(ACCOUNT, "k", "another request")
    kept.keep(ACCOUNT, "k", "another request", ANSWER)
    with pytest.raises(RequestRunning):
        _begin(kept)


def test_a_key_is_free_again_after_its_time_whether_it_was_swept_or_not(
    kept: KeptAnswers, clock: SettableClock, database: Database
) -> None:
    for key in ("k", "other"):
        _begin(kept, key, request_id="r1")
        kept.keep(ACCOUNT, key, "r1", ANSWER)
    clock.advance_s(59)
    assert kept.sweep() == 0
    assert _begin(kept) == ANSWER
    clock.advance_s(1)
    assert _begin(kept) is None
    assert kept.sweep() == 1
    with database.read() as connection:
        assert len(connection.execute(idempotency_records.select()).all()) == 1


def test_an_accounts_oldest_answers_make_room(kept: KeptAnswers, clock: SettableClock) -> None:
    _begin(kept, "running")
    for number in range(4):
        clock.advance_s(1)
        _begin(kept, f"k{number}", request_id="r1")
        kept.keep(ACCOUNT, f"k{number}", "r1", ANSWER)
    with pytest.raises(RequestRunning):
        _begin(kept, "running")
    assert _begin(kept, "k3") == ANSWER
    assert _begin(kept, "k2") == ANSWER
    assert _begin(kept, "k1") is None


def test_the_oldest_answers_go_where_an_accounts_bytes_are_all_taken_and_their_keys_stay(
    kept: KeptAnswers, clock: SettableClock
) -> None:
    large = KeptAnswer(200, {}, b"x" * 100)
    for account, answer in ((ACCOUNT, large), (OTHER_ACCOUNT, ANSWER)):
        for key in ("1", "2", "3"):
            clock.advance_s(1)
            _begin(kept, key, account, request_id=key)
            kept.keep(account, key, key, answer)
    with pytest.raises(AnswerNotKept, match="1"):
        _begin(kept, "1")
    assert [_begin(kept, key) for key in ("2", "3")] == [large] * 2
    assert [_begin(kept, key, OTHER_ACCOUNT) for key in ("1", "2", "3")] == [ANSWER] * 3


def test_what_a_dead_process_was_answering_has_ended(kept: KeptAnswers) -> None:
    _begin(kept)
    _begin(kept, "answered", request_id="r1")
    kept.keep(ACCOUNT, "answered", "r1", ANSWER)
    assert kept.end_abandoned(everybodys=True) == 1
    with pytest.raises(AnswerNotKept):
        _begin(kept)
    assert _begin(kept, "answered") == ANSWER


def test_a_process_that_starts_ends_nothing_that_another_is_answering(
    kept: KeptAnswers, database: Database, clock: SettableClock
) -> None:
    _begin(kept)
    other = KeptAnswers(
        database,
        process="other",
        clock=clock,
        kept_s=60,
        answer_bytes_max=100,
        keys_per_account_max=3,
        account_bytes_max=250,
    )
    _begin(other, "of the other")
    assert other.end_abandoned(everybodys=False) == 1
    with pytest.raises(AnswerNotKept):
        _begin(kept, "of the other")
    with pytest.raises(RequestRunning):
        _begin(other)


def test_keys_are_kept_as_hashes_alone(kept: KeptAnswers, database: Database) -> None:
    _begin(kept, "a secret of the client")
    with database.read() as connection:
        (row,) = connection.execute(idempotency_records.select()).mappings().all()
    assert "secret" not in str(dict(row))
