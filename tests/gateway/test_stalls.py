"""How long decoding may stop: the stream that can spare least decides, and only its own tokens move it."""

import math

import pytest

from gateway.lengths import always
from gateway.need import Need, Running
from gateway.stalls import Stalls

STEP_S = 0.01


def stream(name: str, *, produced: int, between_s_max: float = 0.05) -> Running:
    need = Need(name, 1000, 0, 1000, 100, always(100), between_s_max=between_s_max)
    return Running(need, 1000, 100, 200, 0, 0.0, 0.0, need.lengths, produced=produced, first_at=0.0)


def until(*streams: Running) -> float:
    return Stalls({running.need.id: running for running in streams}).until(STEP_S)


def test_nobody_inside_and_streams_without_a_promise_can_spare_any_time() -> None:
    assert until() == math.inf
    assert until(stream("a", produced=5, between_s_max=math.inf), stream("b", produced=0)) == math.inf


def test_who_can_spare_least_decides_until_it_leaves() -> None:
    early, late = stream("early", produced=10), stream("late", produced=90)
    inside = {running.need.id: running for running in (early, late)}
    stalls = Stalls(inside)
    assert stalls.until(STEP_S) == until(early) < until(late)
    stalls.left(inside.pop("early"))
    assert stalls.until(STEP_S) == until(late)


@pytest.mark.parametrize("name", ["early", "late"])
def test_each_token_is_seen_whoever_has_produced_it(name: str) -> None:
    inside = {one: stream(one, produced=count) for one, count in (("early", 10), ("late", 90))}
    stalls = Stalls(inside)
    stalls.until(STEP_S)
    inside[name].produced += 5
    stalls.progressed(inside[name], STEP_S)
    assert stalls.until(STEP_S) == until(*inside.values())


def test_a_step_that_takes_longer_leaves_less_to_spare() -> None:
    stalls = Stalls({"a": stream("a", produced=10)})
    assert stalls.until(2 * STEP_S) < stalls.until(STEP_S)
