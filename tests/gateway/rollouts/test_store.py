"""A rollout's state outlives processes, one of several changes it, and what was counted is added up once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.errors import RolloutNotFound, RolloutRefused
from gateway.rollouts import store
from gateway.rollouts.store import Cause, State, Telling
from gateway.rollouts.tally import ERRORS, FIRST, REQUESTS
from tenancy.audit_log import COMMAND_LINE, SERVICE, read_audit_log
from tenancy.database import Database
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

MODEL = "m"
COUNTS = {("int4", REQUESTS, 0): 3, ("int4", ERRORS, 0): 1, ("stable", REQUESTS, 0): 9, ("stable", FIRST, 7): 9}


@pytest.fixture(autouse=True)
def begun(database: Database) -> None:
    begin(database)


def begin(database: Database, *, new: str = "int4", at_ns: int = 1) -> None:
    store.begin(database, MODEL, new=new, old="stable", share_bp=1_000, by=SERVICE, at_ns=at_ns)


def promote(database: Database, *, unseen: bool = True) -> None:
    store.promote(database, MODEL, by=COMMAND_LINE, at_ns=5, unseen=unseen)


def test_beginning_again_leaves_what_was_decided(database: Database) -> None:
    store.roll_back(database, MODEL, by=COMMAND_LINE, at_ns=5, why="worse")
    begin(database)
    known = store.read_standing(database, MODEL)
    assert (known.state, known.why, known.loser, known.round) == (State.ROLLED_BACK, "worse", "int4", 1)


def test_another_revision_is_another_rollout(database: Database) -> None:
    promote(database)
    begin(database, new="fp8", at_ns=9)
    known = store.read_standing(database, MODEL)
    assert (known.state, known.new_revision, known.round, known.started_at_ns) == (State.RUNNING, "fp8", 2, 9)


def test_of_many_that_decide_at_once_one_does(database: Database) -> None:
    known = store.read_standing(database, MODEL)

    def decide(number: int) -> bool:
        state = State.PROMOTED if number % 2 else State.ROLLED_BACK
        return store.change(database, known, "rollout.x", by=SERVICE, at_ns=number, why=f"{number}", state=state)

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(decide, range(8)))
    assert sum(made) == 1
    now = store.read_standing(database, MODEL)
    assert now.why == str(made.index(True))
    assert now.version == known.version + 1


def test_counts_of_all_processes_are_added_and_start_anew_with_a_round(database: Database) -> None:
    known = store.read_standing(database, MODEL)
    for process in ("one", "other"):
        store.add_counts(database, known, COUNTS, Telling(process, 1))
    old, new = store.read_samples(database, known)
    assert (old.requests, old.first, new.requests, new.errors) == (18, {7: 18}, 6, 2)
    promote(database, unseen=False)
    store.start_again(database, MODEL, by=COMMAND_LINE, at_ns=6)
    store.add_counts(database, known, COUNTS, Telling("one", 2))  # it has not noticed yet
    again = store.read_standing(database, MODEL)
    assert again.state is State.RUNNING
    assert store.read_samples(database, again)[1].requests == 0
    store.add_counts(database, again, COUNTS, Telling("one", 3))
    assert store.read_samples(database, again)[1].requests == 3


def test_counts_that_are_told_again_by_several_at_once_are_added_once(database: Database) -> None:
    known = store.read_standing(database, MODEL)
    tellings = [Telling("one", 1)] * 4 + [Telling("other", 1), Telling("other", 1)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda telling: store.add_counts(database, known, COUNTS, telling), tellings))
    store.add_counts(database, known, COUNTS, Telling("one", 2))
    assert store.read_samples(database, known)[1].requests == 9


def test_what_has_served_nobody_is_promoted_only_on_purpose(database: Database) -> None:
    with pytest.raises(RolloutRefused, match="int4 of m has served no request yet"):
        promote(database, unseen=False)
    promote(database)
    assert store.read_standing(database, MODEL).loser == "stable"


def test_who_ended_it_is_known_until_it_begins_again(database: Database) -> None:
    assert store.read_standing(database, MODEL).cause is None
    promote(database)
    assert store.read_standing(database, MODEL).cause is Cause.OPERATOR
    store.start_again(database, MODEL, by=COMMAND_LINE, at_ns=6)
    assert store.read_standing(database, MODEL).cause is None
    store.roll_back(database, MODEL, by=COMMAND_LINE, at_ns=7, why="worse")
    begin(database, new="fp8")
    assert store.read_standing(database, MODEL).cause is None


def test_what_is_over_or_not_there_is_not_changed(database: Database) -> None:
    promote(database)
    with pytest.raises(RolloutRefused, match="it was promoted"):
        store.set_share(database, MODEL, 5_000, by=COMMAND_LINE, at_ns=6)
    with pytest.raises(RolloutNotFound):
        store.set_share(database, "other", 5_000, by=COMMAND_LINE, at_ns=6)


def test_every_change_is_in_the_audit_log(database: Database) -> None:
    store.set_share(database, MODEL, 5_000, by=COMMAND_LINE, at_ns=2)
    store.note_evaluation(database, MODEL, 0.9, by=COMMAND_LINE, at_ns=3)
    promote(database)
    entries = [(entry.action, entry.subject) for entry in reversed(read_audit_log(database, None))]
    assert entries == [
        (action, MODEL) for action in ("rollout.start", "rollout.share", "rollout.evaluate", "rollout.promote")
    ]
