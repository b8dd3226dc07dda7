"""Turns: fair between backlogged tenants, nothing banked by idling, strict tiers, bounded everything."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fairness import Entry, FairQueue, QueueBounds, dominant_seconds

BOUNDS = QueueBounds(
    entries_max=10_000, tokens_max=1 << 40, tenant_entries_max=5_000, tenant_tokens_max=1 << 40, idle_tenants_max=8
)


def entry(name: str, tenant: str, cost_s: float = 1.0, **more: float) -> Entry[None]:
    return Entry(
        name,
        tenant,
        int(more.get("tier", 0)),
        cost_s,
        int(more.get("tokens", 1)),
        None,
        weight=more.get("weight", 1.0),
        cached=more.get("cached", 0.0),
    )


def queue(**more: float) -> FairQueue[None]:
    return FairQueue(BOUNDS, cached_ahead_s=more.get("cached_ahead_s", 0.0))


def served(waiting: FairQueue[None], count: int) -> list[str]:
    order = []
    for _ in range(count):
        head = waiting.head()
        if head is None:
            break
        waiting.serve(head)
        order.append(head.id)
    return order


def test_the_scarcest_resource_is_charged() -> None:
    assert dominant_seconds(prefill_s=0.5, decode_s=0.01, pages_s=0.1) == 0.5
    assert dominant_seconds(prefill_s=0.5, decode_s=2.0, pages_s=0.1) == 2.0
    assert dominant_seconds(prefill_s=0.5, decode_s=2.0, pages_s=10.0) == 10.0


@given(
    costs_a=st.lists(st.floats(0.1, 10), min_size=40, max_size=40),
    costs_b=st.lists(st.floats(0.1, 10), min_size=40, max_size=40),
    weight_b=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    turns=st.integers(1, 79),
)
def test_two_backlogged_tenants_stay_within_one_request_of_each_other(
    costs_a: list[float], costs_b: list[float], weight_b: float, turns: int
) -> None:
    waiting = queue()
    for number in range(40):
        waiting.push(entry(f"a{number}", "a", costs_a[number]))
        waiting.push(entry(f"b{number}", "b", costs_b[number], weight=weight_b))
    done = served(waiting, turns)
    if sum(name[0] == "a" for name in done) == 40 or sum(name[0] == "b" for name in done) == 40:
        return  # one of them is not backlogged any more
    bound = max(*costs_a, *(cost / weight_b for cost in costs_b))
    assert abs(waiting.counter("a", 0) - waiting.counter("b", 0)) <= bound + 1e-9


def test_one_tenant_is_served_first_come_first_served() -> None:
    waiting = queue()
    for number in range(5):
        waiting.push(entry(str(number), "a"))
    assert served(waiting, 5) == ["0", "1", "2", "3", "4"]
    assert waiting.head() is None


def test_idling_banks_nothing() -> None:
    waiting = queue()
    for number in range(50):
        waiting.push(entry(f"a{number}", "a"))
    served(waiting, 20)
    for number in range(20):
        waiting.push(entry(f"b{number}", "b"))
    order = served(waiting, 10)
    assert sum(name[0] == "b" for name in order) == 5


def test_a_tenant_that_comes_back_keeps_what_it_had_too_much() -> None:
    waiting = queue()
    waiting.push(entry("a0", "a", 100.0))
    served(waiting, 1)
    for number in range(5):
        waiting.push(entry(f"b{number}", "b"))
    waiting.push(entry("a1", "a"))
    assert served(waiting, 6)[-1] == "a1"


def test_a_correction_settles_what_was_expected_and_what_was() -> None:
    waiting = queue()
    waiting.push(entry("a0", "a", 1.0))
    waiting.push(entry("a1", "a", 1.0))
    waiting.push(entry("b0", "b", 2.0))
    assert served(waiting, 1) == ["a0"]
    waiting.correct("a", 0, 5.0)
    assert waiting.counter("a", 0) == 6.0
    assert served(waiting, 2) == ["b0", "a1"]


def test_a_refund_never_reaches_below_the_virtual_time() -> None:
    waiting = queue()
    for number in range(10):
        waiting.push(entry(f"a{number}", "a"))
        waiting.push(entry(f"b{number}", "b"))
    served(waiting, 10)
    waiting.correct("a", 0, -100.0)
    assert waiting.counter("a", 0) >= waiting.counter("b", 0) - 1.0


def test_a_tier_is_served_before_any_of_the_next() -> None:
    waiting = queue()
    waiting.push(entry("low", "a", tier=2))
    waiting.push(entry("high", "b", tier=1))
    waiting.push(entry("higher", "c", tier=0))
    assert served(waiting, 3) == ["higher", "high", "low"]


def test_a_cached_request_goes_ahead_within_its_bound_only() -> None:
    waiting = queue(cached_ahead_s=2.5)
    for number in range(9):
        waiting.push(entry(f"plain{number}", "a"))
        waiting.push(entry(f"cached{number}", "b", cached=0.9))
    order = served(waiting, 9)
    assert order[:3] == ["cached0", "cached1", "cached2"]
    assert waiting.counter("b", 0) - waiting.counter("a", 0) <= 2.5 + 1.0
    assert sum(name.startswith("plain") for name in order) >= 3


def test_who_leaves_is_not_charged_and_leaves_nothing() -> None:
    waiting = queue()
    waiting.push(entry("a0", "a", 7.0, tokens=5))
    assert waiting.remove("a0") is not None
    assert waiting.remove("a0") is None
    assert waiting.counter("a", 0) == 0.0
    assert len(waiting) == 0
    assert waiting.head() is None
    assert waiting.ahead_s("b", 0) == 0.0


def test_bounds_hold_for_tenants_and_for_all() -> None:
    waiting: FairQueue[None] = FairQueue(
        QueueBounds(entries_max=4, tokens_max=100, tenant_entries_max=2, tenant_tokens_max=60)
    )
    assert waiting.has_room("a", 0, 1000)  # alone, even a large one may wait
    waiting.push(entry("a0", "a", tokens=50))
    assert not waiting.has_room("a", 0, 20)  # its own tokens
    assert waiting.has_room("b", 0, 50)
    assert not waiting.has_room("b", 0, 60)  # everybody's tokens
    waiting.push(entry("a1", "a", tokens=1))
    assert not waiting.has_room("a", 0, 1)  # its own entries
    waiting.push(entry("b0", "b", tokens=1))
    waiting.push(entry("c0", "c", tokens=1))
    assert not waiting.has_room("d", 0, 1)  # everybody's entries


def test_idle_tenants_are_remembered_up_to_a_bound() -> None:
    waiting = queue()
    for number in range(100):
        waiting.push(entry(str(number), f"tenant-{number}"))
        served(waiting, 1)
    assert len(waiting._tiers[0].counters) <= BOUNDS.idle_tenants_max + 1


def test_a_light_tenant_is_not_told_to_wait_for_a_greedy_ones_whole_queue() -> None:
    waiting = queue()
    for number in range(100):
        waiting.push(entry(f"greedy{number}", "greedy"))
    assert waiting.ahead_s("greedy", 0) == pytest.approx(100.0)
    assert waiting.ahead_s("light", 0) <= 2.0
    assert waiting.ahead_s("light", 1) == pytest.approx(100.0)  # a later tier waits for all of this one


def test_the_work_ahead_is_what_is_then_served_before() -> None:
    draw = random.Random(11)
    for trial in range(50):
        waiting = queue()
        for number in range(draw.randint(1, 60)):
            waiting.push(entry(str(number), f"t{draw.randint(0, 5)}", draw.uniform(0.1, 3)))
        served(waiting, draw.randint(0, len(waiting) // 2))
        ahead = waiting.ahead_s("t0", 0)
        waiting.push(entry("mine", "t0", 1.0))
        costs = {each.id: each.cost_s for each in waiting}
        truly = 0.0
        while (head := waiting.head()) is not None and head.id != "mine":
            waiting.serve(head)
            truly += costs[head.id]
        assert truly - 1e-9 <= ahead + 3.0, f"trial {trial}"
        assert ahead <= truly + 6 * 3.0 + 1e-9, f"trial {trial}"


@given(costs=st.lists(st.tuples(st.sampled_from("abcdefghijkl"), st.floats(0.1, 10)), max_size=40))
def test_passing_an_empty_queue_costs_a_tenant_what_waiting_in_it_costs(costs: list[tuple[str, float]]) -> None:
    waited, passed = queue(), queue()
    for number, (tenant, cost_s) in enumerate(costs):
        turn = entry(str(number), tenant, cost_s, weight=2.0)
        waited.push(turn)
        waited.serve(turn)
        passed.pass_by(tenant, 0, cost_s, weight=2.0)
    assert [passed.counter(name, 0) for name in "abcdefghijkl"] == [waited.counter(name, 0) for name in "abcdefghijkl"]
    assert passed.take_charges() == waited.take_charges()
