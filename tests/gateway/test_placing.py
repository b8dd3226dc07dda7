"""Placing by the forecast: prior, learning, shares, affinity, balance, and what requests turn out to take."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.gate import EngineReport, GateLimits
from gateway.placing import Placing, PlacingLimits
from gateway.site import Placed
from gateway.want import Ended, Want

POOL_TOKENS = 10_000
LIMITS = GateLimits(prefill_chunk_tokens=1 << 40, running_max=64, engine_clip_tokens=0)


def make_placing(replicas: int = 1, *, total: int = POOL_TOKENS, limits: GateLimits = LIMITS) -> Placing:
    placing = Placing(PlacingLimits(coverage_every=1))
    for number in range(replicas):
        placing.join(f"engine-{number}", total, 1, limits)
        placing.reported(f"engine-{number}", EngineReport(0, 0.0), 0.0)
    return placing


def want(
    name: str, prompt: int = 1000, cap: int = 8000, *, tenant: str = "a", choices: int = 1, **more: object
) -> Want:
    return Want(name, tenant, "chat", prompt, choices, cap, **more)  # type: ignore[arg-type]  # few fields, by name


def place(placing: Placing, asked: Want, now: float = 0.0) -> Placed | None:
    return placing.place(asked, now, charged_s=placing.expect(asked).cost_s)


def fill(placing: Placing, *, produced: int | None = None) -> int:
    """How many requests of 1,000 tokens enter. produced: what requests have turned out to produce before."""
    for number in range(300 if produced else 0):
        learned = want(f"before{number}")
        assert place(placing, learned) is not None
        placing.ended(learned.request_id, Ended(produced or 0, 1000, 0.1, 0.01))
    return next(number for number in range(100) if place(placing, want(f"r{number}")) is None)


def test_without_history_the_prompt_and_the_outputs_held_ahead_must_fit() -> None:
    assert fill(make_placing()) == 4  # of 1,000 + 1,024 each


def test_short_answers_make_room_for_more_and_long_ones_for_fewer() -> None:
    assert fill(make_placing(), produced=20) >= 8
    assert fill(make_placing(), produced=4000) <= 2


def test_nowhere_without_replicas_and_nothing_at_a_closed_one() -> None:
    assert place(Placing(PlacingLimits()), want("a")) is None
    placing = make_placing()
    placing.sites["engine-0"].open = False
    assert place(placing, want("a")) is None


def test_the_replica_with_the_most_room_is_taken() -> None:
    placing = make_placing(3)
    for number, used in enumerate((6000, 2000, 4000)):
        placing.reported(f"engine-{number}", EngineReport(used, 1.0), 1.0)
    taken = place(placing, want("a"), 1.0)
    assert taken is not None
    assert taken.site.id == "engine-1"


def test_work_that_only_the_engine_knows_of_counts() -> None:
    placing = make_placing()
    placing.reported("engine-0", EngineReport(9500, 1.0), 1.0)
    assert place(placing, want("a", prompt=600, cap=10), 1.0) is None
    assert place(placing, want("b", prompt=400, cap=10), 1.0) is not None


def test_what_has_ended_leaves_nothing_behind() -> None:
    placing = make_placing()
    before = fill(placing)
    for number in range(before):
        placing.ended(f"r{number}", Ended(0, 0))
        placing.ended(f"r{number}", Ended(0, 0))
    assert len(placing.sites["engine-0"].gate) == 0
    assert placing.inside == {}
    assert fill(placing) == before


def test_all_choices_must_fit() -> None:
    placing = make_placing()
    place(placing, want("small", prompt=100, cap=10))
    assert place(placing, want("many", choices=5)) is None
    assert place(placing, want("few", choices=3)) is not None


def test_a_replica_that_comes_back_with_another_pool_starts_anew() -> None:
    placing = make_placing()
    assert fill(placing) == 4
    placing.join("engine-0", 5 * POOL_TOKENS, 1, LIMITS)
    assert placing.inside == {}
    assert place(placing, want("new")) is not None
    assert placing.ended("r0", Ended(5, 5)) == 0.0  # of the old pool: harmless


def test_a_request_costs_its_tenant_what_it_took() -> None:
    placing = make_placing()
    taken = place(placing, want("a1"))
    assert taken is not None
    assert taken.charged_s > 0
    assert placing.ended("a1", Ended(4000, 1000, 0.1, 0.02)) > 0
    place(placing, want("a2"))
    assert placing.ended("a2", Ended(0, 0)) < 0  # it never started: all of it comes back


def prefixed(name: str, *, blocks: int = 4, tenant: str = "a", first: int = 0) -> Want:
    ids = tuple(hash((tenant, first, depth)) for depth in range(blocks))
    return want(name, prompt=blocks * 512 + 100, cap=50, tenant=tenant, blocks=ids)


def test_the_same_prefix_goes_where_it_is_cached_while_that_delays_nobody_much() -> None:
    placing = make_placing(4, total=200_000)
    homes = set()
    for number in range(10):
        asked = prefixed(f"r{number}")
        taken = place(placing, asked, float(number))
        assert taken is not None
        homes.add(taken.site.id)
        placing.ended(asked.request_id, Ended(20, 100, 0.05, 0.01))
    assert len(homes) == 1


def test_a_session_stays_at_its_replica_and_sessions_of_two_tenants_are_two() -> None:
    placing = make_placing(4, total=200_000)
    homes: dict[str, set[str]] = {"a": set(), "b": set()}
    for number in range(10):
        for tenant in "ab":
            asked = want(f"{tenant}{number}", tenant=tenant, cap=50, session="s")
            taken = place(placing, asked, float(number))
            assert taken is not None
            homes[tenant].add(taken.site.id)
            if tenant == "b":
                for each in "ab":
                    placing.ended(f"{each}{number}", Ended(20, 1000, 0.05, 0.01))
    assert len(homes["a"]) == len(homes["b"]) == 1
    assert homes["a"] != homes["b"]


def test_affinity_gives_way_when_its_replica_is_busy() -> None:
    limits = GateLimits(prefill_chunk_tokens=8192, running_max=64, engine_clip_tokens=0)
    placing = make_placing(2, total=400_000, limits=limits)
    for _ in range(200):
        placing.experience.speed.observe_prefill(4096, 4096 * 2048.0, 4.0)  # slow: a thousand tokens a second
    for site in placing.sites.values():
        site.speed = placing.experience.speed
        site.gate.speed = placing.experience.speed
    first = place(placing, prefixed("first"))
    assert first is not None
    place_of_second = place(placing, prefixed("second"), 0.1)  # the first is being prefilled: two seconds
    assert place_of_second is not None
    assert place_of_second.site.id != first.site.id


def test_unique_prefixes_at_a_high_rate_spread_evenly() -> None:
    placing = make_placing(4, total=1_000_000)
    counts: dict[str, int] = {}
    for number in range(200):
        taken = place(placing, prefixed(f"r{number}", first=number), number / 100)
        assert taken is not None
        counts[taken.site.id] = counts.get(taken.site.id, 0) + 1
        placing.progressed(f"r{number}", 1, number / 100)
    assert max(counts.values()) <= 1.2 * min(counts.values())


def test_a_shared_prefix_counts_once_where_the_engine_has_shown_that_it_shares() -> None:
    placing = make_placing(total=6000)
    asked = [prefixed(f"r{number}", blocks=8) for number in range(12)]
    assert place(placing, asked[0]) is not None
    assert place(placing, asked[1]) is None  # nothing shows yet that the engine shares anything
    placing.ended("r0", Ended(10, 8 * 512 + 100, 0.1, 0.01))
    for each in asked[1:8] * 4:  # each one alone, and nearly all of it cached
        assert place(placing, each) is not None
        placing.ended(each.request_id, Ended(10, 100, 0.1, 0.01))
    assert place(placing, asked[8]) is not None
    assert place(placing, asked[9]) is not None
    placing.ended("r8", Ended(10, 100, 0.1, 0.01))
    assert place(placing, asked[10]) is not None
    gate = placing.sites["engine-0"].gate
    assert gate.total_tokens - gate.free_tokens < 6000


def test_an_engine_that_never_caches_is_never_counted_on() -> None:
    placing = make_placing(total=100_000)
    for number in range(50):
        asked = prefixed(f"r{number}")
        assert place(placing, asked) is not None
        placing.ended(asked.request_id, Ended(10, asked.prompt_tokens, 0.1, 0.01))
    assert placing.experience.trust.share == 0.0
    assert placing.expect(prefixed("next")).cached_share == 0.0


def test_speed_is_learned_of_streams_and_of_whole_answers() -> None:
    placing = make_placing(total=1_000_000)
    for number in range(200):
        place(placing, want(f"s{number}"))
        placing.ended(f"s{number}", Ended(100, 1000, first_s=0.5, between_s=0.1))
    assert placing.experience.speed.step_s == pytest.approx(0.1, rel=0.05)
    for number in range(400):
        place(placing, want(f"w{number}", heard=False))
        placing.ended(f"w{number}", Ended(100, 1000, whole_s=20.5))
    assert placing.experience.speed.step_s == pytest.approx(0.2, rel=0.1)


def test_on_trial_a_replica_has_one_request_at_a_time() -> None:
    placing = make_placing()
    placing.sites["engine-0"].on_trial = True
    assert place(placing, want("a")) is not None
    assert place(placing, want("b")) is None
    placing.ended("a", Ended(5, 1000))
    assert place(placing, want("b")) is not None


@pytest.mark.load
@given(seed=st.integers(0, 10_000))
def test_random_histories_never_plan_beyond_the_pool_and_end_empty(seed: int) -> None:
    draw = random.Random(seed)
    placing = make_placing(3, total=20_000)
    inside: dict[str, int] = {}
    for number in range(120):
        now = number / 10
        if draw.random() < 0.6:
            asked = prefixed(f"r{number}", blocks=draw.randint(0, 6), first=draw.randint(0, 3))
            if place(placing, asked, now) is not None:
                inside[asked.request_id] = 0
        elif inside:
            name = draw.choice(sorted(inside))
            inside[name] += draw.randint(1, 20)
            placing.progressed(name, inside[name], now)
            if inside[name] >= 50:
                placing.ended(name, Ended(50, draw.choice([100, 2000]), 0.1, 0.01))
                del inside[name]
        for site in placing.sites.values():
            assert site.gate.free_tokens >= 0
            assert len(site.gate) == sum(placed.site is site for placed in placing.inside.values())
            if draw.random() < 0.2:
                placing.reported(site.id, EngineReport(draw.randint(0, 5000), now), now)
    for name in inside:
        placing.ended(name, Ended(50, 100, 0.1, 0.01))
    for site in placing.sites.values():
        assert len(site.gate) == 0
        site.gate.reported(EngineReport(0, 100.0), 100.0)
        assert site.gate.drift_tokens == 0
        assert site.gate.free_tokens == 20_000
        assert not site.prefixes._holders


def test_in_a_large_fleet_a_part_is_asked_first_and_all_before_anybody_is_refused() -> None:
    placing = make_placing(200)
    for number in range(200):
        placing.reported(f"engine-{number}", EngineReport(9_900, 1.0), 1.0)
    assert place(placing, want("a"), 1.0) is None
    placing.reported("engine-137", EngineReport(0, 2.0), 2.0)
    taken = place(placing, want("b"), 2.0)
    assert taken is not None
    assert taken.site.id == "engine-137"


def test_whose_answers_outgrow_the_forecast_is_planned_with_more_carefully_until_trust_is_back() -> None:
    placing = make_placing()
    for number in range(600):
        learned = want(f"before{number}", 10, 4000, tenant="ab"[number % 2])
        assert place(placing, learned) is not None
        placing.ended(learned.request_id, Ended(20, 10, 0.1, 0.01))
    long, short = want("long", 100, 4000, tenant="a"), want("short", 100, 4000, tenant="b")
    assert place(placing, long) is not None
    assert place(placing, short) is not None
    gate = placing.sites["engine-0"].gate
    placing.progressed("long", 900, 1.0)
    placing.progressed("short", 15, 1.0)
    before = gate.peak()
    assert placing.retracted("engine-0") == {"a"}
    assert gate.peak() > before + 2000  # what it has running may go on to its ceiling

    placing.stopped("long")
    others, its = (_fits(placing, tenant) for tenant in "ba")
    assert its < others / 2
    for now in (0.0, 400.0):
        placing.experience.doubt.tick(now)
    assert _fits(placing, "a") == others


def _fits(placing: Placing, tenant: str) -> int:
    """How many more of this tenant's requests would enter."""
    count = 0
    while place(placing, want(f"try{count}", 100, 4000, tenant=tenant)) is not None:
        count += 1
    for number in range(count):
        placing.ended(f"try{number}", Ended(0, 0))
    return count


def test_pages_taken_back_when_all_were_as_foreseen_are_nobodys_fault() -> None:
    placing = make_placing()
    fill(placing, produced=500)
    for number in range(4):
        placing.progressed(f"r{number}", 400, 1.0)
    assert placing.retracted("engine-0") == frozenset()
