"""What a gateway makes of a rollout: shares while it runs, automatic ends, and a deployment without who has lost."""

import time
from pathlib import Path
from typing import Any

import pytest

from backends.topology import Deployment
from gateway.lifecycle.states import Answered, Begun, Event, Failed, Record, StartLimits, Unit, Wish, advance
from gateway.lifecycle.store import UnitStore
from gateway.request import Outcome
from gateway.rollouts import store
from gateway.rollouts.split import Split
from gateway.rollouts.store import Cause, State
from gateway.rollouts.trials import Trials
from gateway.want import Ended
from tenancy.audit_log import COMMAND_LINE, read_audit_log
from tenancy.database import Database, open_database
from tenancy.errors import TenancyUnavailable
from tests.backends.test_topology import model, replica
from tests.migrated import copy_migrated

MODEL = "@cf/x/y"


@pytest.fixture
def database(tmp_path: Path) -> Any:
    copy_migrated(tmp_path)
    database = open_database(f"sqlite:///{tmp_path / 'pagegate.db'}")
    yield database
    database.close()


def deployment(**rollout: Any) -> Deployment:
    replicas = [replica(), replica(name="b", url="http://10.0.0.2:30000", revision="int4")]
    table = {"revision": "int4", "share_percent": 10, "requests_min": 50} | rollout
    return Deployment.model_validate({"models": [model(replicas=replicas, rollout=table)]})


def names(found: Deployment) -> list[str]:
    return [replica.name for replica in found.models[0].replicas]


def serve(trials: Trials, revision: str, requests: int, *, outcome: Outcome = Outcome.FINISHED) -> None:
    tally = trials.by_model[MODEL].tally
    for _ in range(requests):
        tally.ended(revision, outcome, Ended(10, 5, first_s=0.1, between_s=0.01), code=None)


async def counting(database: Database) -> Trials:
    """A rollout that stays undecided, however its few requests end."""
    trials = Trials(database)
    await trials.declare(deployment(errors_more_percent=10))
    return trials


def counted(database: Database, trials: Trials) -> int:
    """How many requests of the new revision SQL knows of."""
    return store.read_samples(database, trials.by_model[MODEL].standing)[1].requests


async def fail_to_refresh(trials: Trials) -> None:
    with pytest.raises(TenancyUnavailable):
        await trials.refresh()


def stepped(units: UnitStore, record: Record | None, *events: Event) -> Record | None:
    """As its owner takes it from state to state."""
    for event in events:
        assert record is not None
        record = units.save(record, advance(record, event, time.time_ns(), StartLimits()))
    return record


async def test_a_rollout_of_the_file_begins_once_for_all_gateways_with_the_files_share(database: Database) -> None:
    one, other = Trials(database), Trials(database)
    for trials in (one, other):
        await trials.declare(deployment())
        assert trials.by_model[MODEL].split == Split("int4", "stable", 1_000, elsewhere=True)
        assert names(trials.in_force(deployment())) == ["a", "b"]


async def test_harm_that_two_gateways_saw_in_part_takes_it_back_in_both_and_after_a_restart(database: Database) -> None:
    one, other = Trials(database), Trials(database)
    for trials in (one, other):
        await trials.declare(deployment())
        serve(trials, "stable", 100)
        serve(trials, "int4", 2, outcome=Outcome.UPSTREAM_FAILED)
    assert not await one.refresh()
    assert await other.refresh()
    assert await one.refresh()
    restarted = Trials(database)
    await restarted.declare(deployment())
    for trials in (one, other, restarted):
        assert trials.by_model[MODEL].split is None
        assert names(trials.in_force(deployment())) == ["a"]
    assert store.read_standing(database, MODEL).why.startswith("errors: 0.00 % → 100.00 %")


async def test_one_that_is_as_good_waits_for_an_operator_unless_the_file_says_otherwise(database: Database) -> None:
    trials = Trials(database)
    await trials.declare(deployment(errors_more_percent=10))
    serve(trials, "stable", 400)
    serve(trials, "int4", 400)
    assert not await trials.refresh()
    await trials.declare(deployment(errors_more_percent=10, promote="automatic"))
    assert await trials.refresh()
    assert names(trials.in_force(deployment())) == ["b"]


async def test_a_share_that_an_operator_sets_is_followed(database: Database) -> None:
    trials = Trials(database)
    await trials.declare(deployment(when_full="wait"))
    store.set_share(database, MODEL, 5_000, by=COMMAND_LINE, at_ns=1)
    assert await trials.refresh()
    assert trials.by_model[MODEL].split == Split("int4", "stable", 5_000, elsewhere=False)


async def test_without_a_rollout_nothing_is_asked_of_the_database(database: Database) -> None:
    trials = Trials(database)
    await trials.declare(Deployment.model_validate({"models": [model()]}))
    database.close()
    assert not await trials.refresh()
    assert names(trials.in_force(Deployment.model_validate({"models": [model()]}))) == ["a"]


async def test_who_left_and_who_was_never_served_say_nothing_of_a_revision(database: Database) -> None:
    trials = Trials(database)
    await trials.declare(deployment())
    for outcome in (Outcome.CLIENT_DISCONNECTED, Outcome.CANCELLED, Outcome.EVICTED, Outcome.REFUSED):
        serve(trials, "int4", 50, outcome=outcome)
    await trials.refresh()
    known = store.read_standing(database, MODEL)
    assert (store.read_samples(database, known)[1].requests, known.state) == (0, State.RUNNING)


async def test_what_was_counted_while_the_database_was_away_is_passed_on_once_it_answers(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, add_counts = await counting(database), store.add_counts

    def away(*_: object) -> None:
        raise TenancyUnavailable("away", retry_after_s=1)

    monkeypatch.setattr(store, "add_counts", away)
    for _ in range(2):
        serve(trials, "int4", 3)
        await fail_to_refresh(trials)

    monkeypatch.setattr(store, "add_counts", add_counts)
    await trials.refresh()
    await trials.refresh()
    assert counted(database, trials) == 6


async def test_a_call_that_was_given_up_and_still_ends_well_has_told_everything_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, call = await counting(database), database.call

    async def given_up(function: Any, *args: Any) -> None:
        await call(function, *args)
        raise TenancyUnavailable("it took too long", retry_after_s=1)

    serve(trials, "int4", 3)
    with monkeypatch.context() as patched:
        patched.setattr(database, "call", given_up)
        await fail_to_refresh(trials)
    await trials.refresh()
    assert counted(database, trials) == 3


async def test_counts_whose_commit_was_made_and_not_answered_are_added_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, add_counts = await counting(database), store.add_counts

    def unanswered(*args: Any) -> None:
        add_counts(*args)
        raise TenancyUnavailable("the connection was lost", retry_after_s=1)

    serve(trials, "int4", 3)
    with monkeypatch.context() as patched:
        patched.setattr(store, "add_counts", unanswered)
        for _ in range(2):
            await fail_to_refresh(trials)
    serve(trials, "int4", 2)
    await trials.refresh()
    await trials.refresh()
    assert counted(database, trials) == 5


async def test_a_revision_whose_engines_never_start_is_taken_back_once_by_whichever_gateway_sees_it_first(
    database: Database,
) -> None:
    one, other = Trials(database), Trials(database)
    for trials in (one, other):
        await trials.declare(deployment())
    units = UnitStore(database, lease_s=100, clock=time.time_ns, limits=StartLimits())
    unit = Unit(MODEL, "b", "here")
    units.add([(unit, Wish.AWAKE)])
    record = units.take(unit, "keeper")
    for failures in range(StartLimits().failures_max):
        assert not await one.refresh(), f"{failures} failures"
        record = stepped(units, record, Begun(), Failed("no such program"))
    assert await one.refresh()
    assert await other.refresh()
    for trials in (one, other):
        assert names(trials.in_force(deployment())) == ["a"]
        assert not await trials.refresh()
    known = store.read_standing(database, MODEL)
    assert (known.state, known.cause) == (State.ROLLED_BACK, Cause.NEVER_STARTED)
    assert known.why == "it never started: b (5 times): no such program"
    assert [entry.action for entry in read_audit_log(database, None)] == ["rollout.roll_back", "rollout.start"]
    # Mended: the next round's units begin anew, and one that runs is not given up.
    store.start_again(database, MODEL, by=COMMAND_LINE, at_ns=time.time_ns())
    assert await one.refresh()
    stepped(units, record, Begun(), Answered())
    assert not await one.refresh()
    assert names(one.in_force(deployment())) == ["a", "b"]
