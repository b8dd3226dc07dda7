"""The door: whose turn, who is sent away and with which hint, and that a promise is kept."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.door import Door, Let, No, Refusal, Sent, Waiting
from gateway.fairness import QueueBounds
from gateway.want import Want
from tests.gateway.places import PagePlacing

BOUNDS = QueueBounds(entries_max=8, tokens_max=1 << 30, tenant_entries_max=8, tenant_tokens_max=1 << 30)


def make_door(pages: int) -> tuple[Door, PagePlacing]:
    placing = PagePlacing(pages)
    return Door(placing, BOUNDS, retry_after_s_max=60), placing


def digest_of(name: str) -> Callable[[], bytes]:
    return name.encode


def want(name: str, need: int = 1, *, tenant: str = "a", prompt: str = "", first_s_max: float = 1e9) -> Want:
    return Want(name, tenant, "chat", need, 1, 1, first_s_max=first_s_max, digest=digest_of(prompt or name))


def experienced(door: Door) -> None:
    """Waits have turned out as the work ahead said."""
    for _ in range(50):
        door.waits.observe(1.0, 1.0)


def test_whoever_fits_is_let_in_at_once() -> None:
    door, _ = make_door(1)
    assert isinstance(door.arrive(want("a"), 0.0, wait_s=5), Let)
    assert isinstance(door.arrive(want("b"), 0.0, wait_s=5), Waiting)


def test_who_would_not_wait_is_told_so() -> None:
    door, _ = make_door(0)
    answer = door.arrive(want("a"), 0.0, wait_s=0)
    assert isinstance(answer, Refusal)
    assert answer.why is No.BUSY
    assert 1 <= answer.retry_after_s <= 60


def test_who_would_have_its_first_token_too_late_is_refused_at_arrival() -> None:
    door, _ = make_door(0)
    experienced(door)
    for number in range(4):
        assert isinstance(door.arrive(want(str(number)), 0.0, wait_s=60), Waiting)
    late = door.arrive(want("late", first_s_max=3.0), 0.0, wait_s=60)
    assert isinstance(late, Refusal)
    assert late.why is No.LATE
    assert isinstance(door.arrive(want("patient", first_s_max=30.0), 0.0, wait_s=60), Waiting)


def test_a_prompt_that_alone_takes_longer_than_the_promise_is_served_for_what_it_is_worth() -> None:
    door, placing = make_door(0)
    placing.prefill_s = 9.0
    waiting = door.arrive(want("huge", first_s_max=5.0), 0.0, wait_s=60)
    assert isinstance(waiting, Waiting)
    assert waiting.start_by == 60.0


def test_nobody_enters_after_its_deadline() -> None:
    door, placing = make_door(0)
    assert isinstance(door.arrive(want("a"), 0.0, wait_s=5), Waiting)
    placing.free = placing.total = 1
    answer = door.next(5.1)
    assert isinstance(answer, Sent)
    assert answer.refusal.why is No.EXPIRED
    assert placing.order == []


def test_who_comes_again_when_told_goes_before_its_tenants_others_and_is_not_refused() -> None:
    door, placing = make_door(0)
    experienced(door)
    for number in range(5):
        door.arrive(want(f"w{number}"), 0.0, wait_s=60)
    refused = door.arrive(want("first try", prompt="p", first_s_max=2.0), 0.0, wait_s=60)
    assert isinstance(refused, Refusal)
    back_at = float(refused.retry_after_s)
    stranger = door.arrive(want("another", prompt="q", first_s_max=2.0), back_at, wait_s=60)
    assert isinstance(stranger, Refusal)
    again = door.arrive(want("again", prompt="p", first_s_max=2.0), back_at, wait_s=60)
    assert isinstance(again, Waiting)
    assert again.kept
    placing.free = placing.total = 1
    let = door.next(back_at)
    assert isinstance(let, Let)
    assert let.waiting is again


def test_a_kept_place_is_there_though_the_queue_is_full() -> None:
    door, _ = make_door(0)
    for number in range(8):
        door.arrive(want(f"w{number}"), 0.0, wait_s=600)
    refused = door.arrive(want("first try", prompt="p"), 0.0, wait_s=600)
    assert isinstance(refused, Refusal)
    assert refused.why is No.FULL
    assert isinstance(door.arrive(want("again", prompt="p"), float(refused.retry_after_s), wait_s=600), Waiting)
    assert isinstance(door.arrive(want("stranger"), float(refused.retry_after_s), wait_s=600), Refusal)


def test_promised_work_counts_as_ahead_of_the_tenants_new_requests() -> None:
    door, placing = make_door(0)
    experienced(door)
    placing.costs = {"w": 4.0, **{f"t{number}": 4.0 for number in range(8)}}
    door.arrive(want("w"), 0.0, wait_s=60)
    first = door.arrive(want("t0", first_s_max=2.0), 0.0, wait_s=60)
    hints = [door.arrive(want(f"t{number}", first_s_max=2.0), 0.0, wait_s=60) for number in range(1, 8)]
    assert isinstance(first, Refusal)
    last = hints[-1]
    assert isinstance(last, Refusal)
    assert last.retry_after_s > first.retry_after_s


@given(ahead=st.floats(0, 1e6), seconds=st.floats(0.1, 1e5), tenant=st.text(max_size=5))
def test_a_hint_is_a_bounded_integer_of_at_least_one(ahead: float, seconds: float, tenant: str) -> None:
    door, placing = make_door(0)
    experienced(door)
    placing.costs["w"] = ahead
    door.arrive(want("w", tenant=tenant), 0.0, wait_s=1e9)
    answer = door.arrive(want("x", tenant=tenant), 0.0, wait_s=0)
    assert isinstance(answer, Refusal)
    assert isinstance(answer.retry_after_s, int)
    assert 1 <= answer.retry_after_s <= 60
    door.waits.observe(1.0, seconds)


@pytest.mark.parametrize("why", ["busy", "late", "full", "expired"])
def test_every_refusal_says_when_to_come_again(why: str) -> None:
    door, _ = make_door(0)
    experienced(door)
    for number in range(8 if why == "full" else 2):
        door.arrive(want(f"w{number}"), 0.0, wait_s=60)
    if why == "expired":
        answer = door.next(61.0)
        assert isinstance(answer, Sent)
        refusal = answer.refusal
    else:
        wait_s = {"busy": 0.0, "late": 1.0, "full": 60.0}[why]
        arrived = door.arrive(want("x"), 0.0, wait_s=wait_s)
        assert isinstance(arrived, Refusal)
        refusal = arrived
    assert refusal.why.value == why
    assert refusal.retry_after_s >= 1
