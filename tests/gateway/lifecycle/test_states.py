"""What follows what: every state has a way out, failures are counted and rested on, and an operator's word stands."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lifecycle.states import (
    Answered,
    Begun,
    By,
    Closed,
    Deed,
    Depth,
    Event,
    Failed,
    Found,
    Record,
    Reopened,
    Slept,
    StartLimits,
    State,
    Unit,
    Vanished,
    Wish,
    Wished,
    advance,
    due,
    found,
    happens,
)

LIMITS = StartLimits(failures_max=3)
S = 1_000_000_000
UNIT = Unit("model", "a")
ASLEEP = Record(UNIT)
AWAKE = replace(ASLEEP, wish=Wish.AWAKE)
EVENTS: tuple[Event, ...] = (
    Begun(),
    Answered(),
    Failed("it broke"),
    Closed(),
    Reopened(),
    Slept(Depth.STOPPED),
    Slept(Depth.RELEASED),
    Vanished(),
    *(Wished(wish, by) for wish in Wish for by in By),
)


def after(record: Record, *events: Event, at_ns: int = S) -> Record:
    for event in events:
        record = advance(record, event, at_ns, LIMITS)
    return record


def test_it_wakes_when_it_is_wished_awake_and_sleeps_when_it_is_not() -> None:
    assert due(ASLEEP, S) is Deed.NOTHING
    woken = after(ASLEEP, Wished(Wish.AWAKE, By.REQUEST))
    assert due(woken, S) is Deed.START
    ready = after(woken, Begun(), Answered())
    assert (ready.state, due(ready, S)) == (State.READY, Deed.NOTHING)
    tired = after(ready, Wished(Wish.ASLEEP, By.IDLE, Depth.RELEASED))
    assert due(tired, S) is Deed.CLOSE
    slept = after(tired, Closed(), Slept(tired.wish_depth))
    assert (slept.state, slept.depth, due(slept, S)) == (State.ASLEEP, Depth.RELEASED, Deed.NOTHING)
    assert due(after(slept, Wished(Wish.AWAKE, By.REQUEST)), S) is Deed.RESUME


def test_one_that_is_wanted_again_while_it_drains_is_asked_anew() -> None:
    draining = after(AWAKE, Begun(), Answered(), Wished(Wish.ASLEEP, By.IDLE), Closed(), Wished(Wish.AWAKE, By.REQUEST))
    assert due(draining, S) is Deed.REOPEN
    assert after(draining, Reopened()).state is State.WARMING


def test_failures_pause_longer_and_longer_and_then_rest() -> None:
    pauses = []
    record, now_ns = AWAKE, S
    while record.state is not State.FAILED:
        assert due(record, record.retry_at_ns) is Deed.START
        record = after(record, Begun(), Failed("no memory"), at_ns=now_ns)
        assert due(record, record.retry_at_ns - 1) is Deed.NOTHING
        pauses.append((record.retry_at_ns - now_ns) / S)
        now_ns = record.retry_at_ns
    assert pauses == [0.5, 1.0, 300.0]
    assert (record.failures, record.why) == (3, "no memory")
    assert due(record, now_ns) is Deed.START  # seldom, but not never


def test_an_operator_who_wakes_a_failed_one_is_obeyed_at_once() -> None:
    failed = replace(AWAKE, state=State.FAILED, failures=3, retry_at_ns=10**18, why="no memory")
    assert due(after(failed, Wished(Wish.AWAKE, By.REQUEST)), S) is Deed.NOTHING
    assert due(after(failed, Wished(Wish.AWAKE, By.OPERATOR)), S) is Deed.START


def test_a_death_after_a_good_run_is_a_first_failure() -> None:
    ready = replace(AWAKE, state=State.READY, since_ns=S, failures=2)
    assert after(ready, Failed("killed"), at_ns=2 * S).state is State.FAILED
    assert after(ready, Failed("killed"), at_ns=100 * S).failures == 1


def test_what_an_operator_holds_asleep_nobody_else_wakes() -> None:
    held = after(ASLEEP, Wished(Wish.HELD, By.OPERATOR))
    for by in By:
        woken = after(held, Wished(Wish.AWAKE, by))
        assert (woken.wish is Wish.AWAKE) == (by is By.OPERATOR)


def test_what_an_operator_sent_to_sleep_wakes_for_a_request_and_not_for_a_forecast() -> None:
    sent = after(AWAKE, Wished(Wish.ASLEEP, By.OPERATOR))
    assert after(sent, Wished(Wish.AWAKE, By.SCALER)).wish is Wish.ASLEEP
    assert after(sent, Wished(Wish.AWAKE, By.DEPLOYMENT)).wish is Wish.ASLEEP
    assert after(sent, Wished(Wish.AWAKE, By.REQUEST)).wish is Wish.AWAKE


def test_a_new_owner_finds_what_ran_gone_and_starts_it_without_blame() -> None:
    for state in (State.WARMING, State.READY, State.DRAINING):
        found = after(replace(AWAKE, state=state, failures=1), Vanished())
        assert (found.state, found.failures, due(found, S)) == (State.ASLEEP, 1, Deed.START)
    failed = replace(AWAKE, state=State.FAILED, retry_at_ns=10**18)
    assert after(failed, Vanished()) == failed


def test_what_can_not_happen_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        after(ASLEEP, Answered())
    with pytest.raises(AssertionError):
        after(AWAKE, Begun(), Begun())


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 400)), max_size=60))
def test_in_every_history_each_start_has_an_end_and_every_state_a_way_out(history: list[tuple[Event, int]]) -> None:
    record, now_ns, runs = ASLEEP, S, False
    for event, seconds in history:
        now_ns += seconds * S
        if not happens(record, event):
            continue
        was, record = record, advance(record, event, now_ns, LIMITS)
        if isinstance(event, Begun):
            assert not runs, "started twice"
            runs = True
        if record.state in {State.ASLEEP, State.FAILED} and was.state is not record.state:
            runs = False
        assert runs == (record.state not in {State.ASLEEP, State.FAILED})
    ready = _led(record, Wish.AWAKE, now_ns)
    assert ready.state is State.READY
    assert _led(ready, Wish.ASLEEP, now_ns).state is State.ASLEEP


def _led(record: Record, wish: Wish, now_ns: int) -> Record:
    """An operator wishes, and all goes well."""
    record = advance(record, Wished(wish, By.OPERATOR), now_ns, LIMITS)
    for _ in range(5):
        match due(record, now_ns):
            case Deed.START | Deed.RESUME:
                record = after(record, Begun(), Answered(), at_ns=now_ns)
            case Deed.CLOSE:
                record = after(record, Closed(), Slept(record.wish_depth), at_ns=now_ns)
            case Deed.REOPEN:
                record = after(record, Reopened(), Answered(), at_ns=now_ns)
            case Deed.NOTHING if record.state is State.WARMING:
                record = after(record, Answered(), at_ns=now_ns)
            case Deed.NOTHING if record.state is State.DRAINING:
                record = after(record, Slept(record.wish_depth), at_ns=now_ns)
    return record


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("depth", list(Depth))
@pytest.mark.parametrize("wish", list(Wish))
def test_a_new_owner_finds_what_is_gone_and_what_was_left_over_whatever_the_last_one_was_doing(
    state: State, depth: Depth, wish: Wish
) -> None:
    record = Record(Unit("m", "a"), state, depth=depth, wish=wish)
    rests = state in {State.ASLEEP, State.FAILED}
    stopped = rests and depth is Depth.STOPPED
    assert found(record, runs=False) is (Found.AS_WRITTEN if stopped else Found.GONE)
    left_over = stopped and wish is not Wish.AWAKE
    assert found(record, runs=True) is (Found.LEFT_OVER if left_over else Found.AS_WRITTEN)
