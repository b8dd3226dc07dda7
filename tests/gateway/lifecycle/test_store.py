"""A unit has one owner at a time, a change that saw an old row changes nothing, and wishes meet without loss."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
import sqlalchemy as sa

from gateway.lifecycle.states import (
    Answered,
    Begun,
    By,
    Closed,
    Deed,
    Depth,
    Failed,
    Record,
    Slept,
    StartLimits,
    State,
    Unit,
    Vanished,
    Wish,
    Wished,
    advance,
    due,
)
from gateway.lifecycle.store import UnitStore
from tenancy.database import Database
from tests.tenancy.clock import SettableClock
from tests.tenancy.conftest import over_both_databases

pytestmark = over_both_databases

A, B = Unit("model", "a"), Unit("model", "b")
LIMITS = StartLimits(failures_max=3)
LEASE_S = 10


@pytest.fixture
def store(database: Database, clock: SettableClock) -> UnitStore:
    store = UnitStore(database, lease_s=LEASE_S, clock=clock, limits=LIMITS)
    store.add([(A, Wish.ASLEEP), (B, Wish.AWAKE)])
    return store


def taken(store: UnitStore, owner: str = "me", unit: Unit = A) -> Record:
    record = store.take(unit, owner)
    assert record is not None
    return record


def test_what_is_known_stays_as_it_is_but_for_a_wish_of_the_file(store: UnitStore) -> None:
    store.wish(A, Wished(Wish.AWAKE, By.REQUEST))
    store.wish(B, Wished(Wish.ASLEEP, By.IDLE, Depth.RELEASED))
    store.add([(A, Wish.ASLEEP), (B, Wish.AWAKE)])
    a, b = store.all()
    assert (a.wish, a.wish_by) == (Wish.AWAKE, By.REQUEST)
    assert (b.wish, b.wish_by) == (Wish.AWAKE, By.DEPLOYMENT)
    assert store.of([B]) == [b]
    assert store.of([]) == []
    store.forget(A)
    assert store.wish(A, Wished(Wish.AWAKE, By.OPERATOR)) is None
    assert store.take(A, "me") is None


def test_whoever_has_seen_a_new_unit_may_wish_otherwise_while_the_file_is_still_read(
    store: UnitStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, write = Unit("model", "new"), database.write

    @contextmanager
    def written() -> Iterator[sa.Connection]:
        with write() as connection:
            yield connection
        monkeypatch.undo()
        store.wish(new, Wished(Wish.ASLEEP, By.IDLE))

    monkeypatch.setattr(database, "write", written)
    store.add([(new, Wish.AWAKE)])
    [record] = store.of([new])
    assert (record.wish, record.wish_by) == (Wish.ASLEEP, By.IDLE)


def test_a_unit_is_one_owners_until_its_lease_ends(store: UnitStore, clock: SettableClock) -> None:
    first = taken(store)
    assert store.take(A, "other") is None
    clock.advance_s(LEASE_S - 1)
    assert store.renew("me") == {A}
    clock.advance_s(LEASE_S - 1)
    assert store.take(A, "other") is None
    clock.advance_s(2)
    second = taken(store, "other")
    assert second.fence == first.fence + 1
    assert store.renew("me") == set()
    assert store.save(first, advance(first, Wished(Wish.AWAKE, By.REQUEST), clock(), LIMITS)) is None


def test_whoever_gives_up_or_is_known_to_be_dead_is_not_waited_for(store: UnitStore) -> None:
    mine = taken(store)
    store.free(mine)
    theirs = taken(store, "other")
    store.free(mine)  # it is not mine any more
    assert store.take(A, "third") is None
    store.free_place(A.place)
    assert taken(store, "third").fence == theirs.fence + 1


def test_of_two_changes_of_the_same_row_one_counts(store: UnitStore, clock: SettableClock) -> None:
    mine = taken(store, unit=B)
    wished = store.wish(B, Wished(Wish.HELD, By.OPERATOR))
    assert wished is not None
    assert store.save(mine, advance(mine, Begun(), clock(), LIMITS)) is None
    assert due(wished, clock()) is Deed.NOTHING
    assert store.save(wished, replace(wished, why="seen")) is not None


def test_what_is_kept_is_what_was_saved(store: UnitStore, clock: SettableClock) -> None:
    begun = advance(taken(store, unit=B), Begun(), clock(), LIMITS)
    saved = store.save(store.of([B])[0], begun)
    assert saved is not None
    failed = store.save(saved, advance(saved, Failed("exit code 1\x7f: é", 0.5), clock(), LIMITS))
    assert store.of([B]) == [failed]


def test_wishes_that_meet_are_all_heard(store: UnitStore, database: Database) -> None:
    store = UnitStore(database, lease_s=LEASE_S, clock=count(1).__next__, limits=LIMITS)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: store.wish(A, Wished(Wish.AWAKE, By.OPERATOR)), range(12)))
    assert store.of([A])[0].version >= 13


@dataclass
class Owner:
    """A process that sees, pauses, and then acts on what it saw, as one whose machine stalls does."""

    name: str
    saw: Record | None = None
    started: list[tuple[int, int]] = field(default_factory=list)  # fence, since


@pytest.mark.parametrize("seed", range(4))
def test_in_random_histories_nothing_is_started_twice_and_no_unit_has_two_owners(
    store: UnitStore, clock: SettableClock, seed: int
) -> None:
    chance = random.Random(seed)
    owners = [Owner("one"), Owner("two"), Owner("three")]
    runs_by: Owner | None = None
    for _ in range(60):
        clock.advance_s(chance.choice([0, 1, 4]))
        if chance.random() < 0.3:
            store.wish(A, Wished(chance.choice(list(Wish)), chance.choice(list(By))))
        owner = chance.choice(owners)
        if owner.saw is None or chance.random() < 0.3:
            before = store.of([A])[0]
            owner.saw = store.take(A, owner.name) or owner.saw
            if owner.saw is not None and owner.saw.fence > before.fence:
                assert before.owner in {None, owner.name} or before.lease_until_ns <= clock()
                if before.owner != owner.name and owner.saw.state is not State.ASLEEP:
                    # As a keeper does: what ran there ended with the one that had it, or is ended.
                    owner.saw = store.save(owner.saw, advance(owner.saw, Vanished(), clock(), LIMITS))
                    runs_by = None
        elif (changed := _step(owner.saw, chance, clock())) is not None:
            saved = store.save(owner.saw, changed)
            if saved is not None and saved.state is State.WARMING and owner.saw.state is not State.DRAINING:
                assert runs_by is None, "started twice"
                runs_by = owner
            if saved is not None and saved.state in {State.ASLEEP, State.FAILED}:
                runs_by = None
            owner.saw = saved or store.of([A])[0]
            if owner.saw.owner != owner.name:
                owner.saw = None
        now = store.of([A])[0]
        assert (runs_by is not None) == (now.state in {State.WARMING, State.READY, State.DRAINING})


def _step(record: Record, chance: random.Random, now_ns: int) -> Record | None:
    match due(record, now_ns):
        case Deed.START | Deed.RESUME:
            return advance(record, Begun(), now_ns, LIMITS)
        case Deed.CLOSE:
            return advance(record, Closed(), now_ns, LIMITS)
    if record.state is State.WARMING:
        event = Answered() if chance.random() < 0.6 else Failed("it broke", chance.random())
        return advance(record, event, now_ns, LIMITS)
    if record.state is State.DRAINING:
        return advance(record, Slept(Depth.STOPPED), now_ns, LIMITS)
    return None
