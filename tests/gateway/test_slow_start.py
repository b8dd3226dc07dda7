"""Who comes back gets its share by and by, unless it was away alone."""

import pytest

from gateway.slow_start import SlowStart

EAST = {"a": "east", "b": "east"}
WEST = {"c": "west", "d": "west"}


@pytest.fixture
def starts() -> SlowStart:
    starts = SlowStart(10.0)
    starts.look(EAST | WEST, 0.0)
    return starts


def test_a_region_that_comes_back_gets_its_share_by_and_by(starts: SlowStart) -> None:
    assert starts.share("a", 0.0) == 1.0, "nothing was lost at the start"
    starts.look(WEST, 10.0)
    starts.look({"a": "east"} | WEST, 20.0)
    starts.look(EAST | WEST, 21.0)
    assert starts.share("a", 20.0) == pytest.approx(0.1)
    assert starts.share("b", 21.0) == pytest.approx(0.1), "its neighbour has just come back itself"
    assert starts.share("a", 25.0) == pytest.approx(0.55)
    assert starts.share("c", 25.0) == 1.0
    starts.look(EAST | WEST, 40.0)
    assert starts.share("a", 40.0) == starts.share("b", 40.0) == 1.0


def test_one_replicas_hiccup_is_nobodys_return(starts: SlowStart) -> None:
    starts.look({"a": "east"} | WEST, 10.0)
    starts.look(EAST | WEST, 11.0)
    assert starts.share("b", 11.0) == 1.0


def test_who_is_lost_again_begins_again(starts: SlowStart) -> None:
    starts.look(WEST, 10.0)
    starts.look({"a": "east"} | WEST, 20.0)
    starts.look(WEST, 28.0)
    starts.look({"a": "east"} | WEST, 29.0)
    assert starts.share("a", 29.0) == pytest.approx(0.1)


def test_a_new_replica_and_one_that_is_served_no_more_have_no_past(starts: SlowStart) -> None:
    starts.look(EAST | WEST | {"e": "north"}, 1.0)
    assert starts.share("e", 1.0) == 1.0
    starts.look(EAST, 2.0)
    starts.forget("c")
    starts.look(EAST | {"c": "west"}, 3.0)
    assert starts.share("c", 3.0) == 1.0


def test_without_seconds_there_is_no_ramp() -> None:
    starts = SlowStart(0.0)
    starts.look(EAST, 0.0)
    starts.look({}, 1.0)
    starts.look(EAST, 2.0)
    assert starts.share("a", 2.0) == 1.0
