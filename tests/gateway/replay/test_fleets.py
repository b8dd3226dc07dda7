"""Fleets of many replicas and gateways: rivals behind late reports fill replicas over, who share a board do not."""

from dataclasses import asdict, replace
from itertools import count

import pytest

from gateway.replay.fleets import FleetReport, run_fleet
from gateway.replay.profiles import FLEETS, PROFILES, FleetProfile
from tests.gateway.replay.synthetic import synthetic_rows

SMALL = replace(PROFILES["h200-8b-bf16"], total_tokens=60_000)
ROWS = synthetic_rows(500)


def run(
    replicas: int = 8,
    gateways: int = 4,
    *,
    load: float = 0.9,
    delay_s: float = 0.2,
    claim_s: float | None = None,
    seed: int = 1,
) -> FleetReport:
    ticks = count()
    fleet = FleetProfile(replicas, 2, gateways, delay_s, claim_s, load, decisions=400)
    return run_fleet(ROWS, fleet, SMALL, seed=seed, clock_ns=lambda: 1000 * next(ticks))


def test_one_gateway_a_region_never_fills_a_replica_over() -> None:
    alone = run(gateways=2)
    assert alone.over_full <= 0.01
    assert alone.good_of_oracle >= 0.9
    assert alone.decisions == 400


def test_rivals_behind_late_reports_over_admit_more_than_one_alone() -> None:
    assert run(gateways=16, load=1.2).over_full > run(gateways=2, load=1.2).over_full


@pytest.mark.load
def test_rivals_that_share_a_board_fill_no_replica_over() -> None:
    alone, shared = run(gateways=16, load=1.2), run(gateways=16, load=1.2, claim_s=0.001)
    assert alone.over_full > 0.05
    assert (shared.over_full, shared.retracted) == (0.0, 0.0)
    assert shared.decisions == alone.decisions == 400
    assert (shared.shared, alone.shared) == (True, False)


@pytest.mark.load
def test_who_finds_no_room_by_what_is_claimed_waits_a_moment_and_no_longer() -> None:
    alone, shared = run(), run(claim_s=0.001)
    assert alone.waited_ms_p99 == 0.0 < shared.waited_ms_p99 <= 250.0
    assert shared.waited_ms_p50 <= 50.0, "most are let in at once"


def test_a_fleet_that_is_half_asked_for_refuses_nobody() -> None:
    calm = run(load=0.3)
    assert (calm.refused, calm.retracted) == (0.0, 0.0)
    assert calm.good_of_oracle == 1.0
    assert 0.05 < calm.used_mean < 0.6


@pytest.mark.load
def test_the_same_seed_plays_the_same() -> None:
    first, again = asdict(run(claim_s=0.001)), asdict(run(claim_s=0.001))
    assert first == again
    assert first != asdict(run(claim_s=0.001, seed=2))


def test_the_clock_that_is_handed_in_times_decisions() -> None:
    assert run().decision_us_p99 == 1.0


@pytest.mark.parametrize("replicas", sorted(FLEETS))
def test_fleets_are_told_by_their_replicas_and_divide_evenly(replicas: int) -> None:
    fleet = FLEETS[replicas]
    assert fleet.replicas == replicas
    assert fleet.replicas % fleet.regions == fleet.gateways % fleet.regions == 0
