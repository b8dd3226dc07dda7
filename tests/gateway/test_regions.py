"""Which region a request goes to: by when its first token comes, with what a round trip is taken to last."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.regions import Choice, RegionMap, allows, choose

HOME, NEAR, FAR = "eu-west", "eu-north", "us-east"
AWAY_S = {FAR: 0.08, HOME: 0.0, NEAR: 0.02}


def chosen(
    *, now: dict[str, float], later: dict[str, float] | None = None, turn_s: dict[str, float] | None = None
) -> tuple[Choice[str], list[str]]:
    """now: where it would enter, and when its first token would come. later: where it would have to wait."""
    asked: list[str] = []
    waits = later or {}

    def ask(region: str) -> tuple[str | None, float]:
        asked.append(region)
        return (region, now[region]) if region in now else (None, waits.get(region, math.inf))

    return choose(AWAY_S, ask, own_s=lambda _: 0.01, known=(), turn_s=turn_s or {}), asked


def test_home_goes_first_and_nobody_else_is_asked_that_is_later_for_the_way_alone() -> None:
    choice, asked = chosen(now={HOME: 0.01, NEAR: 0.01, FAR: 0.01})
    assert (choice.found, asked) == (HOME, [HOME])


def test_it_goes_elsewhere_once_that_is_sooner_with_the_round_trip() -> None:
    assert chosen(now={HOME: 0.029, NEAR: 0.01})[0].found == HOME
    assert chosen(now={HOME: 0.031, NEAR: 0.01})[0].found == NEAR
    assert chosen(now={NEAR: 0.2, FAR: 0.01})[0].found == FAR


def test_it_waits_at_home_where_that_is_sooner_and_goes_where_it_is_not() -> None:
    waits, _ = chosen(now={NEAR: 0.01}, later={HOME: 0.025})
    assert waits.found is None
    assert waits.waits_in(None) == {HOME: 0.025}
    assert chosen(now={NEAR: 0.01}, later={HOME: 0.035})[0].found == NEAR
    assert chosen(now={NEAR: 0.01})[0].found == NEAR, "nobody foresees room at home"


def test_who_fits_nowhere_waits_everywhere_or_where_it_is_bound_to() -> None:
    choice, _ = chosen(now={}, later={HOME: 0.5})
    assert choice.found is None
    assert choice.waits_in(None) is None
    assert choice.waits_in(frozenset({HOME, "mars"})) == {HOME: 0.5, "mars": math.inf}


def test_a_region_where_others_wait_counts_from_their_turn() -> None:
    assert chosen(now={HOME: 0.01, NEAR: 0.01}, turn_s={HOME: 1.0})[0].found == NEAR
    waits, asked = chosen(now={HOME: 0.01, NEAR: 0.01}, turn_s={HOME: 0.02})
    assert (waits.found, asked) == (None, [NEAR])
    assert waits.waits_in(None) == {HOME: 0.02}


@given(
    now=st.dictionaries(st.sampled_from([HOME, NEAR, FAR]), st.floats(0.01, 2)),
    later=st.dictionaries(st.sampled_from([HOME, NEAR, FAR]), st.floats(0.01, 2)),
)
def test_no_region_would_have_been_sooner(now: dict[str, float], later: dict[str, float]) -> None:
    choice, _ = chosen(now=now, later=later)
    starts = {region: now.get(region, later.get(region, math.inf)) + away for region, away in AWAY_S.items()}
    if choice.found is not None:
        assert starts[choice.found] == min(starts.values())
    elif now:
        (waits,) = choice.waits_in(None) or {}
        assert waits not in now
        assert starts[waits] == min(starts.values())


def test_a_round_trip_is_what_the_file_says_or_else_the_shortest_of_the_last_probes() -> None:
    regions = RegionMap(HOME)
    assert regions.round_trip_s(NEAR) == 0.0
    for seconds in (0.5, 0.021, 0.09):
        regions.probed(NEAR, seconds)
        regions.probed(HOME, seconds)
    assert regions.round_trip_s(NEAR) == 0.021
    assert regions.round_trip_s(HOME) == 0.0
    for _ in range(16):
        regions.probed(NEAR, 0.04)  # the way has become longer
    assert regions.round_trip_s(NEAR) == 0.04
    regions.tell({NEAR: 0.03})
    assert regions.round_trip_s(NEAR) == 0.03
    regions.tell({})
    assert regions.round_trip_s(NEAR) == 0.04


@pytest.mark.parametrize(
    ("regions", "allowed"), [(None, True), (frozenset({HOME}), True), (frozenset({FAR}), False), (frozenset(), False)]
)
def test_a_binding_allows_what_it_names(regions: frozenset[str] | None, *, allowed: bool) -> None:
    assert allows(regions, HOME) is allowed
