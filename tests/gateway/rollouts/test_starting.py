"""A new revision is given up when all of its engines have failed to start too often, and not before."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.lifecycle.states import Record, State, Unit, Wish
from gateway.rollouts.starting import in_trouble, never_started

NOW, BEGAN = 1_000, 500
FAILED = Record(
    Unit("m", "b", "here"),
    State.FAILED,
    since_ns=700,
    owner="keeper",
    lease_until_ns=2_000,
    wish=Wish.AWAKE,
    failures=5,
    why="b ended with exit code 1",
)


def unit(name: str, place: str = "here", **fields: Any) -> Record:
    return replace(FAILED, unit=Unit("m", name, place), **fields)


def given_up(*units: Record, names: tuple[str, ...] = ("b",), served: int = 0) -> str | None:
    return never_started(units, names, since_ns=BEGAN, now_ns=NOW, served=served)


def test_a_revision_whose_only_engine_rests_after_its_failures_is_given_up_with_the_reason() -> None:
    assert given_up(FAILED) == "it never started: b (5 times): b ended with exit code 1"


@pytest.mark.parametrize("state", [state for state in State if state is not State.FAILED])
def test_one_that_is_tried_runs_or_waits_for_its_next_start_is_not(state: State) -> None:
    assert given_up(replace(FAILED, state=state)) is None
    assert given_up(FAILED, unit("c", state=state), names=("b", "c")) is None


def test_one_that_starts_at_another_gateway_is_not() -> None:
    assert given_up(FAILED, unit("b", "there", state=State.READY)) is None
    assert given_up(FAILED, unit("b", "there")) == "it never started: b (5 times): b ended with exit code 1"


def test_what_failed_before_the_rollout_began_failed_for_another() -> None:
    assert given_up(replace(FAILED, since_ns=BEGAN - 1)) is None


def test_a_unit_whose_owner_is_silent_says_nothing() -> None:
    silent = unit("b", "there", state=State.READY, lease_until_ns=NOW)
    assert given_up(silent) is None
    assert given_up(FAILED, silent) is not None
    assert given_up(replace(FAILED, lease_until_ns=NOW)) is None


def test_an_engine_that_something_else_starts_may_come_at_any_time() -> None:
    assert given_up(FAILED, names=("b", "attached")) is None
    assert given_up(names=("attached",)) is None


def test_what_an_operator_holds_asleep_is_not_waited_for_and_is_no_reason() -> None:
    held = unit("c", state=State.ASLEEP, wish=Wish.HELD, failures=0)
    assert given_up(FAILED, held, names=("b", "c")) is not None
    assert given_up(replace(held, unit=FAILED.unit)) is None


def test_one_that_has_served_is_given_up_in_other_words() -> None:
    assert given_up(FAILED, served=3) == "none of its engines starts any more: b (5 times): b ended with exit code 1"


def test_the_same_reason_of_several_is_said_once() -> None:
    assert given_up(FAILED, unit("b", "there"), unit("c"), unit("d", why="no GPU"), names=("b", "c", "d")) == (
        "it never started: b, c (5 times): b ended with exit code 1; d (5 times): no GPU"
    )


def test_an_operator_is_told_of_starts_that_fail_while_they_are_tried_again() -> None:
    again = replace(FAILED, state=State.ASLEEP, failures=2)
    assert in_trouble([again], now_ns=NOW) == "starts that failed: b (2 times): b ended with exit code 1"
    assert in_trouble([replace(FAILED, state=State.READY, failures=2)], now_ns=NOW) is None
    assert in_trouble([replace(FAILED, state=State.WARMING, failures=0, why="")], now_ns=NOW) is None
