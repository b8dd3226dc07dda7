"""What is asked of a model: read off its door, and summed over processes without counting an engine twice."""

from dataclasses import replace

import pytest

from gateway.door import Door, Refusal, Waiting
from gateway.fairness import QueueBounds
from gateway.gate import EngineReport, GateLimits
from gateway.lifecycle.demand import Demand, Half, Part, together
from gateway.lifecycle.sides import Side
from gateway.placing import Placing, PlacingLimits
from gateway.want import Want

LIMITS = GateLimits(prefill_chunk_tokens=8192, running_max=64, engine_clip_tokens=0)
BOUNDS = QueueBounds(entries_max=64, tokens_max=1 << 20, tenant_entries_max=64, tenant_tokens_max=1 << 20)
POOL = 10_000


def door_of(*pools: int) -> Door:
    placing = Placing(PlacingLimits())
    for index, pool in enumerate(pools):
        placing.join(f"engine-{index}", pool, 1, LIMITS)
    return Door(placing, BOUNDS, retry_after_s_max=60)


def want(name: str, prompt: int = 4000) -> Want:
    return Want(name, "tenant", "chat", prompt, 1, 1000)


def test_what_runs_and_what_waits_is_the_demand() -> None:
    door = door_of(POOL)
    demand = Demand(door)
    demand.part(0.0)
    while not isinstance(door.arrive(want(f"r{door.asked.cost_s}"), 0.0, wait_s=60), Waiting):
        pass
    part = demand.part(5.0)
    assert part.serving == 1
    assert part.replica == POOL
    assert 0 < part.own <= part.peak <= POOL
    assert part.waiting == door.placing.will_hold(want("one"))
    assert part.prefill > 0
    assert part.wait_s > 0
    assert part.patience_s == 60
    assert together([part], awake=1, start_s=30.0)[Side.UNIFIED].wait_share == part.wait_s / 60
    assert part.refused == 0.0


def test_what_is_refused_is_seen_although_nothing_runs_of_it() -> None:
    door = door_of(POOL)
    demand = Demand(door)
    demand.part(0.0)
    answers = [door.arrive(want(str(number)), 0.0, wait_s=0) for number in range(20)]
    refused = sum(isinstance(answer, Refusal) for answer in answers)
    seen = together([demand.part(5.0)], awake=1, start_s=30.0)[Side.UNIFIED]
    assert refused > 10
    assert seen.turned_away == pytest.approx(refused / 20)


def test_a_closed_replica_serves_nobody_and_its_pool_is_no_capacity() -> None:
    door = door_of(POOL, 2 * POOL)
    door.placing.sites["engine-0"].open = False
    part = Demand(door).part(0.0)
    assert (part.serving, part.replica) == (1, 2 * POOL)


def test_what_another_gateway_holds_is_in_the_engines_report_and_counts_once() -> None:
    mine, other = Part(serving=2, replica=POOL, peak=900, own=600, used=1500), None
    other = replace(mine, peak=1200, own=900)
    seen = together([mine, other], awake=2, start_s=30.0)[Side.UNIFIED]
    assert seen.demand_tokens == 900 + 1200
    assert seen.held_tokens == 1500
    assert seen.serving == 2
    alone = together([mine], awake=2, start_s=30.0)[Side.UNIFIED]
    assert alone.demand_tokens == 900 + (1500 - 600), "who holds the rest is not known, only that it is held"


def test_the_engines_report_counts_where_nobody_of_ours_runs() -> None:
    door = door_of(POOL)
    door.placing.reported("engine-0", EngineReport(7000, 1.0), 1.0)
    seen = together([Demand(door).part(1.0)], awake=1, start_s=30.0)[Side.UNIFIED]
    assert seen.demand_tokens == seen.held_tokens == 7000


def test_pairs_have_two_sides_with_pools_of_their_own() -> None:
    door = door_of(POOL)
    part = Demand(door).part(0.0, halves=[Half(100.0, 5000), Half(50.0, 4000)])
    seen = together([part, replace(part, serving=1)], awake=2, start_s=30.0)
    assert set(seen) == {Side.PREFILL, Side.DECODE}
    prefill = seen[Side.PREFILL]
    assert (prefill.serving, prefill.replica_tokens, prefill.held_tokens) == (2, 4000, 150.0)
    assert seen[Side.DECODE].serving == 1


def test_what_waits_for_one_side_asks_nothing_of_the_other() -> None:
    waits = Part(serving=1, replica=POOL, halves=1, half=POOL, half_waiting=500.0, wait_s=30, patience_s=60)
    waits = replace(waits, prefilling_s=24)
    for_decode = together([waits], awake=1, start_s=30.0)
    assert for_decode[Side.DECODE].wait_share == 0.5
    idle = for_decode[Side.PREFILL]
    assert (idle.wait_share, idle.backlog_share, idle.demand_tokens, idle.waiting_tokens) == (0.0, 0.0, 0.0, 0.0)
    for_prefill = together([replace(waits, prefill_short=True)], awake=1, start_s=30.0)
    assert (for_prefill[Side.DECODE].wait_share, for_prefill[Side.DECODE].backlog_share) == (0.0, 0.0)
    busy = for_prefill[Side.PREFILL]
    assert (busy.wait_share, busy.backlog_share, busy.demand_tokens, busy.waiting_tokens) == (0.5, 0.4, 500.0, 500.0)


def test_nobody_has_reported_yet() -> None:
    seen = together([], awake=None, start_s=30.0)[Side.UNIFIED]
    assert (seen.serving, seen.demand_tokens, seen.replica_tokens) == (0, 0.0, 0)
