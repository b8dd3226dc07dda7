"""How many replicas: bounded, growing with demand, ahead of it, calm on a constant load, never below what is held."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lifecycle.scaling import (
    Bounds,
    Judged,
    ModelScaling,
    NeedsOfAWhile,
    ScalingRules,
    Seen,
    SideScaling,
    Trend,
    Wished,
    holds_need,
    needed,
    pressed,
    units,
    wish,
)
from gateway.lifecycle.sides import Side

POOL = 100_000
RULES = ScalingRules()
TICK_S = 5.0
IDLE = Seen(
    serving=1,
    awake=None,
    replica_tokens=POOL,
    demand_tokens=0.0,
    held_tokens=0.0,
    prefill_share=0.0,
    turned_away=0.0,
    wait_share=0.0,
    backlog_share=0.0,
    start_s=60.0,
    patience_s=60.0,
)

shares = st.floats(0, 50, allow_nan=False)
seen_sides = st.builds(
    Seen,
    serving=st.integers(0, 40),
    awake=st.none() | st.integers(0, 40),
    replica_tokens=st.sampled_from([0, 1, POOL]),
    demand_tokens=st.floats(0, 50 * POOL),
    held_tokens=st.floats(0, 10 * POOL),
    prefill_share=shares,
    turned_away=st.floats(0, 1),
    wait_share=shares,
    backlog_share=shares,
    start_s=st.floats(0, 600),
    patience_s=st.floats(0, 600),
)
bounds = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: Bounds(min(pair), max(pair)))


def kv(replicas: float) -> float:
    """Demand that fills so many replicas to what is planned with."""
    return replicas * POOL * RULES.filled


def most_needed(side: Side, seen: Seen) -> float:
    return max(needed(side, seen, RULES).values())


def follow(loads: list[float], *, most: int = 32, start_s: float = 60.0, side: Side = Side.UNIFIED) -> list[int]:
    """Replicas after each tick, for KV demand given in replicas; a start takes `start_s`."""
    scaling, serving, starting, answers = SideScaling(side), 1, list[float](), list[int]()
    for tick, load in enumerate(loads):
        now = tick * TICK_S
        serving += sum(ready <= now for ready in starting)
        starting = [ready for ready in starting if ready > now]
        seen = replace(IDLE, serving=serving, awake=serving + len(starting), demand_tokens=kv(load), start_s=start_s)
        wished = scaling.decide(seen, Bounds(1, most), now).replicas
        starting += [now + start_s] * (wished - serving - len(starting))
        serving -= max(0, serving + len(starting) - wished)
        answers.append(wished)
    return answers


@given(st.lists(seen_sides, min_size=1, max_size=12), bounds, st.sampled_from(list(Side)))
def test_the_answer_is_within_the_bounds_and_has_room_for_what_is_held(
    history: list[Seen], allowed: Bounds, side: Side
) -> None:
    scaling, wished = SideScaling(side), Wished(0, "")
    for tick, seen in enumerate(history):
        standing = seen.serving if not tick else wished.replicas
        standing = standing if seen.awake is None else seen.awake
        wished = scaling.decide(seen, allowed, tick * 200.0)
        holds = holds_need(seen)
        assert allowed.least <= wished.replicas <= max(allowed.most, holds)
        assert wished.replicas >= min(standing, holds), "what is there stays while it is needed"
        assert wished.why


@given(seen=seen_sides, other=seen_sides, allowed=bounds, side=st.sampled_from(list(Side)), may_shrink=st.booleans())
def test_more_demand_never_wishes_fewer_replicas(
    seen: Seen, other: Seen, allowed: Bounds, side: Side, *, may_shrink: bool
) -> None:
    more = replace(
        seen,
        demand_tokens=max(seen.demand_tokens, other.demand_tokens),
        held_tokens=max(seen.held_tokens, other.held_tokens),
        prefill_share=max(seen.prefill_share, other.prefill_share),
        turned_away=max(seen.turned_away, other.turned_away),
        wait_share=max(seen.wait_share, other.wait_share),
        backlog_share=max(seen.backlog_share, other.backlog_share),
    )
    answers = []
    for one in (seen, more):
        need = max(needed(side, one, RULES).values())
        ahead = max(need, pressed(one, need, RULES))
        judged = Judged(one.awake or one.serving, ahead, need, holds_need(one), may_shrink, "demand")
        answers.append(wish(judged, allowed, slack=RULES.slack).replicas)
    assert answers[0] <= answers[1]


@given(st.floats(0, 12), st.integers(0, 12))
def test_a_constant_load_settles_and_then_changes_nothing(load: float, before: int) -> None:
    answers = follow([float(before)] + [load] * 300)
    changes = [later - earlier for earlier, later in pairwise(answers) if later != earlier]
    assert changes == sorted(changes, key=lambda change: change < 0), "once it has shrunk it does not grow again"
    assert len(set(answers[150:])) == 1
    assert max(1, math.ceil(load - 1e-6)) <= answers[-1] <= max(1, math.ceil(load * (1 + RULES.slack)))


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_load_does_not_flap(seed: int) -> None:
    draw = Random(seed)
    answers = follow([max(0.0, draw.gauss(5.0, 0.8)) for _ in range(720)])  # an hour
    settled = answers[120:]
    assert sum(later < earlier for earlier, later in pairwise(settled)) <= 4
    assert min(settled) >= 5
    assert max(settled) <= 9


def test_growth_is_asked_for_before_the_load_is_there() -> None:
    # From 2 to 10 replicas within 20 minutes: what is started when it is needed comes a minute late.
    loads = [2.0] * 24 + [2.0 + 8.0 * tick / 240 for tick in range(240)] + [10.0] * 24
    answers = follow(loads)
    for tick in range(60, 264):
        serving_by_then = answers[tick - int(60 / TICK_S)]
        assert serving_by_then >= math.ceil(loads[tick] - 1e-6), "it serves when the load comes"
    assert max(answers) <= 13


def test_a_burst_is_answered_at_once_and_kept_for_a_while() -> None:
    answers = follow([1.0] * 80 + [6.0] * 6 + [1.0] * 160)
    assert answers[79] == 1
    assert answers[80] >= 6
    assert answers[85 + int(RULES.calm_s / TICK_S) - 8] >= 6, "the gap may be one between two bursts"
    assert answers[-1] <= 2


def test_whoever_has_just_come_shrinks_nothing_before_it_has_watched() -> None:
    scaling = SideScaling(Side.UNIFIED)
    seen = replace(IDLE, serving=8)
    watched = [scaling.decide(seen, Bounds(1, 8), tick * TICK_S).replicas for tick in range(100)]  # awake: unknown
    until = int(RULES.calm_s / TICK_S)
    assert watched[: until - 1] == [8] * (until - 1)
    assert watched[-1] == 1


def test_what_runs_is_never_left_without_room() -> None:
    scaling, held = SideScaling(Side.UNIFIED), 2.5 * POOL
    seen = replace(IDLE, serving=6, demand_tokens=0.0, held_tokens=held)
    wished = [scaling.decide(seen, Bounds(1, 8), tick * TICK_S) for tick in range(100)][-1]
    assert wished == Wished(3, "running requests hold 3")


def test_a_long_wait_asks_for_more_although_pages_are_free() -> None:
    seen = replace(IDLE, serving=4, demand_tokens=kv(4.0), wait_share=1.5 * RULES.wait_share)
    wished = SideScaling(Side.DECODE).decide(seen, Bounds(1, 16), 0.0)
    # An eighth of a minute's work of four is late, and to be done within a minute.
    assert wished == Wished(5, "who waits is late and asks for 4.5")


def test_work_that_is_late_asks_for_what_does_it_in_the_time_there_is() -> None:
    seen = replace(IDLE, serving=4, wait_share=RULES.wait_share + 0.5, patience_s=30.0)
    late_s = 4 * 0.5 * 30.0
    assert pressed(seen, 4.0, RULES) == pytest.approx(4.0 + late_s / 60.0), "a start takes longer than they may wait"
    assert pressed(replace(seen, start_s=10.0), 4.0, RULES) == pytest.approx(4.0 + late_s / 30.0)


def test_what_is_worked_off_before_a_start_is_over_starts_nothing() -> None:
    seen = replace(IDLE, serving=4, wait_share=RULES.wait_share + 0.5, patience_s=30.0)
    assert pressed(seen, 2.9, RULES) == 0.0, "four do in a minute what is late beside what comes"
    assert pressed(seen, 3.1, RULES) > 3.1
    assert pressed(replace(seen, start_s=5.0), 2.9, RULES) > 2.9, "a start is over sooner"


def test_what_waits_is_not_multiplied_by_what_was_refused() -> None:
    seen = replace(IDLE, demand_tokens=2.0 * POOL, waiting_tokens=1.0 * POOL, turned_away=0.5)
    assert needed(Side.DECODE, seen, RULES) == {"the forecast KV demand fills": pytest.approx(3.0 / RULES.filled)}


def test_replicas_that_start_are_the_answer_to_a_wait_and_no_more_are_asked_for() -> None:
    scaling, awake = SideScaling(Side.UNIFIED), 4
    for tick in range(12):
        seen = replace(IDLE, serving=4, awake=awake, demand_tokens=kv(4.0), wait_share=30.0)
        awake = scaling.decide(seen, Bounds(1, 64), tick * TICK_S).replicas
    assert awake == 8


def test_what_was_turned_away_counts_as_demand() -> None:
    full = replace(IDLE, serving=2, demand_tokens=2.0 * POOL)
    seen = replace(full, turned_away=0.5)
    assert most_needed(Side.UNIFIED, seen) == pytest.approx(2 * most_needed(Side.UNIFIED, full))


def test_prefill_and_decode_halves_are_counted_apart() -> None:
    scaling = ModelScaling()
    prefill = replace(IDLE, serving=2, prefill_share=3.0)
    decode = replace(IDLE, serving=2, demand_tokens=kv(1.4))
    wished = scaling.decide({Side.PREFILL: prefill, Side.DECODE: decode}, Bounds(1, 9), 0.0)
    assert (wished[Side.PREFILL].replicas, wished[Side.DECODE].replicas) == (4, 2)
    assert units(wished) == wished[Side.PREFILL]


def test_prefill_work_does_not_scale_decode_halves() -> None:
    busy = replace(IDLE, prefill_share=9.0, backlog_share=90.0)
    assert most_needed(Side.DECODE, busy) == 0.0
    assert most_needed(Side.PREFILL, busy) > most_needed(Side.PREFILL, IDLE)


def test_a_side_that_is_no_longer_deployed_is_forgotten() -> None:
    scaling = ModelScaling()
    scaling.decide({Side.PREFILL: IDLE, Side.DECODE: IDLE}, Bounds(1, 2), 0.0)
    assert set(scaling.decide({Side.UNIFIED: IDLE}, Bounds(1, 2), 1.0)) == {Side.UNIFIED}


def test_a_model_of_which_nothing_is_known_keeps_what_serves() -> None:
    unknown = replace(IDLE, serving=3, replica_tokens=0, held_tokens=5.0)
    assert holds_need(unknown) == 3
    assert SideScaling(Side.UNIFIED).decide(unknown, Bounds(1, 4), 0.0).replicas == 3


def test_a_slope_is_believed_once_it_exceeds_its_own_error() -> None:
    draw, noise, rise = Random(1), Trend(), Trend()
    foreseen = []
    for tick in range(60):
        noise.observe(3.0 + draw.gauss(0.0, 1.0), tick * TICK_S, fade_s=120.0)
        rise.observe(3.0 + tick / 10, tick * TICK_S, fade_s=120.0)
        foreseen.append(noise.ahead(60.0, deviations=0.0))
    assert max(foreseen[:8]) <= 5.0, "what little is known is not drawn out into a line"
    assert max(foreseen[20:]) <= 4.5
    assert rise.ahead(60.0, deviations=1.0) == pytest.approx(3.0 + (59 + 12) / 10), "a straight line is"


@given(st.lists(st.floats(0, 50), min_size=1, max_size=28))
def test_all_but_a_hundredth_of_a_while_s_needs_is_within_what_was_enough(lately: list[float]) -> None:
    needs = NeedsOfAWhile(300.0)
    for slot, need in enumerate(lately):
        needs.observe(need, slot * 10.0)
    enough = needs.enough(len(lately) * 10.0)
    beyond = sum(max(0.0, need - enough) for need in lately)
    assert beyond == pytest.approx(0.01 * sum(lately), abs=1e-6)
    assert enough <= max(lately)
