"""May one more enter this replica: each limit on its own, and what is kept of requests that come and go."""

import math

import pytest

from gateway.forecast import EngineSpeed
from gateway.gate import EngineReport, Entry, Gate, GateLimits
from gateway.lengths import LengthDistribution, always
from gateway.need import Need


def make_gate(total: int = 100_000, page: int = 1, **limits: float) -> Gate:
    return Gate(
        total,
        page,
        GateLimits(
            prefill_chunk_tokens=int(limits.get("chunk", 8192)),
            running_max=int(limits.get("running_max", 100)),
            engine_clip_tokens=int(limits.get("clip", 16)),
        ),
        EngineSpeed(prefill_tokens_s=40_000, step_s=0.01),
    )


def need(name: str, prompt: int = 1000, output: int = 100, *, heard: bool = True, **more: int) -> Need:
    lengths: LengthDistribution = always(output)
    return Need(
        name,
        prompt,
        more.get("shared", 0),
        more.get("uncached", prompt),
        more.get("ceiling", output),
        lengths,
        between_s_max=0.05,
        heard=heard,
    )


def report(gate: Gate, used: int, at: float) -> None:
    gate.reported(EngineReport(used, at, 0.7), at)


def started(gate: Gate, request: Need, *, produced: int = 50, now: float = 0.0) -> None:
    gate.enter(request, now)
    gate.progressed(request.id, 1, now)
    gate.progressed(request.id, produced, now)


def test_an_idle_replica_takes_whatever_fits_its_pool() -> None:
    assert make_gate().entry(need("a", prompt=99_000, output=1000), 0.0) is Entry.NOW


def test_the_crossing_requests_own_size_counts() -> None:
    gate = make_gate()
    started(gate, need("a", prompt=90_000))
    assert gate.entry(need("b", prompt=9_000, output=500), 0.0) is Entry.NOW
    assert gate.entry(need("b", prompt=11_000, output=500), 0.0) is Entry.PAGES


def test_what_will_be_free_when_needed_is_not_reserved_twice() -> None:
    gate = make_gate(total=10_000)
    started(gate, need("a", prompt=4_000, output=60), produced=50)
    # 4,060 + 5,900 pass the pool together, but "a" is gone after ten more steps.
    assert gate.entry(need("b", prompt=4_000, output=1_950), 0.0) is Entry.NOW
    assert gate.entry(need("b", prompt=5_990, output=1_000), 0.0) is Entry.PAGES


def test_a_second_prefill_waits_unless_both_fit_one_batch() -> None:
    gate = make_gate()
    gate.enter(need("a", prompt=5_000), 0.0)
    assert gate.entry(need("b", prompt=3_000), 0.0) is Entry.NOW
    assert gate.entry(need("b", prompt=4_000), 0.0) is Entry.PREFILL
    gate.progressed("a", 1, 1.0)
    gate.progressed("a", 60, 1.0)
    assert gate.entry(need("b", prompt=4_000), 1.0) is Entry.NOW


def test_a_prefill_waits_until_running_streams_can_spare_the_time() -> None:
    gate = make_gate()
    gate.enter(need("a", output=4), 0.0)
    gate.progressed("a", 1, 10.0)
    newcomer = need("b", prompt=8_000)  # 0.2 s of prefill
    assert gate.entry(newcomer, 10.0) is Entry.BETWEEN
    assert gate.clears_in_s(Entry.BETWEEN, newcomer, 10.0) > 0
    assert gate.entry(need("c", prompt=2_000), 10.0) is Entry.NOW


def test_the_engines_own_reserve_and_its_bound_on_requests_are_kept() -> None:
    gate = make_gate(total=20_000, clip=4096)
    started(gate, need("a", prompt=9_000, output=100, ceiling=8_000))
    assert gate.entry(need("b", prompt=8_000, output=100, ceiling=8_000), 0.0) is Entry.ENGINE
    full = make_gate(running_max=1)
    started(full, need("a"))
    assert full.entry(need("b"), 0.0) is Entry.ENGINE


def test_whoever_is_refused_for_the_grants_sake_asks_for_more_each_time() -> None:
    gate = make_gate()
    gate.granted_tokens = 100
    asked = need("a", prompt=5_000)
    for _ in range(2):
        assert gate.entry(asked, 0.0) is Entry.PAGES
        assert gate.short_of >= 5_000
        gate.short_of = 0.0  # granted, and given up again before it entered
    gate.granted_tokens = 6_000
    assert gate.entry(asked, 0.0) is Entry.NOW
    assert not gate.short_of


def test_shared_tokens_count_once_and_are_inherited() -> None:
    gate = make_gate(total=12_000)
    started(gate, need("a", prompt=8_000, output=100))
    sharer = need("b", prompt=9_000, output=100, shared=8_000, uncached=1_000)
    assert gate.entry(sharer, 0.0) is Entry.NOW
    started(gate, sharer)
    gate.leave("a")
    assert gate.entry(need("c", prompt=6_000), 0.0) is Entry.NOW
    gate.inherit("b", 8_000)
    assert gate.entry(need("c", prompt=6_000), 0.0) is Entry.PAGES


def test_an_engine_that_reports_more_than_the_ledger_knows_is_believed() -> None:
    gate = make_gate()
    started(gate, need("a"))
    report(gate, 95_000, 0.0)
    assert gate.entry(need("b", prompt=6_000), 0.0) is Entry.PAGES
    report(gate, 2_000, 1.0)
    assert gate.entry(need("b", prompt=6_000), 1.0) is Entry.NOW


def test_a_report_that_lags_behind_entries_does_not_hide_them() -> None:
    gate = make_gate()
    started(gate, need("a", prompt=50_000))
    report(gate, 50_000, 0.0)
    started(gate, need("b", prompt=45_000))
    assert gate.entry(need("c", prompt=6_000), 0.0) is Entry.PAGES


def test_headroom_shrinks_smoothly_as_a_report_ages_and_stays_bounded() -> None:
    gate = make_gate()
    started(gate, need("a"))
    for second in range(50):
        report(gate, 1_000 if second % 2 else 4_000, float(second))
    capacities = [gate.capacity(49.0 + age) for age in (0.0, 0.1, 1.0, 5.0, 60.0, 1e6)]
    assert capacities == sorted(capacities, reverse=True)
    assert capacities[0] == 100_000
    assert capacities[-1] >= 90_000
    assert capacities[1] > 99_000


def test_a_prompt_in_prefill_is_no_drift() -> None:
    gate = make_gate()
    gate.enter(need("a", prompt=60_000), 0.0)
    for second in range(50):
        report(gate, second * 1000, float(second))
    assert gate.drift.deviation == pytest.approx(0.0, abs=1e-3)


def test_whoever_leaves_leaves_nothing_behind() -> None:
    gate = make_gate()
    for number in range(5):
        gate.enter(need(str(number), prompt=1_000), 0.0)
    gate.progressed("1", 1, 0.0)
    gate.progressed("2", 70, 0.0)
    for number in range(5):
        gate.leave(str(number))
        gate.leave(str(number))
    assert len(gate) == 0
    assert gate.prefilling_s() == 0.0
    assert gate.entry(need("z", prompt=99_000), 0.0) is Entry.NOW
    assert gate.room_in_s(need("z", prompt=99_000), 0.0, probability=0.9) == 0.0


def test_it_says_when_there_will_be_room() -> None:
    gate = make_gate(total=10_000)
    started(gate, need("a", prompt=8_000, output=200), produced=100)
    room_s = gate.room_in_s(need("b", prompt=5_000), 0.0, probability=0.9)
    assert room_s is not None
    assert 1.0 <= room_s <= 2.0
    assert gate.room_in_s(need("b", prompt=11_000), 0.0, probability=0.9) is None


def test_sizes_round_up_to_pages() -> None:
    gate = make_gate(page=64)
    assert gate.paged(1) == 64
    assert gate.paged(64) == 64
    assert gate.paged(65) == 128
    started(gate, need("a", prompt=65), produced=1)
    ((_, resident, produced),) = gate.known_running()
    assert (resident, produced) == (128, 1)
    assert math.isclose(gate.capacity(0.0), 100_000)
