"""What an operator reads of a unit is true in every state: what it does, for whom, and what comes next."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.lifecycle.states import By, Depth, Record, State, Unit, Wish
from gateway.lifecycle.telling import is_kept, retry_in_s, told

S = 1_000_000_000
NOW = 10_000 * S
ASLEEP = Record(Unit("m", "a", "here"), since_ns=NOW - 40 * S, owner="keeper", lease_until_ns=NOW + S)
ORDERED: dict[str, Any] = {"wish_by": By.OPERATOR}
AWAKE: dict[str, Any] = {"wish": Wish.AWAKE, "wish_by": By.REQUEST}
FAILURE = "; last failure: no GPU"
BROKEN: dict[str, Any] = AWAKE | {"failures": 5, "why": "no GPU", "retry_at_ns": NOW + 290 * S}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "asleep for 40 s: wished asleep by deployment, until it is needed"),
        (ORDERED, "asleep for 40 s: wished asleep by operator, until a request needs it"),
        (ORDERED | {"wish": Wish.HELD}, "asleep for 40 s: wished asleep by operator, until `engine wake`"),
        (
            {"depth": Depth.RELEASED, "wish_by": By.IDLE, "since_ns": NOW - 600 * S},
            "asleep without its memory for 10 min: wished asleep by idle, until it is needed",
        ),
        (AWAKE, "asleep for 40 s: about to start, by request"),
        (
            BROKEN | {"failures": 1, "retry_at_ns": NOW + 2 * S},
            "asleep for 40 s: 1 start failed, the next one is in 2 s; last failure: no GPU",
        ),
        (AWAKE | {"state": State.WARMING}, "warming for 40 s: wished awake by request"),
        (
            AWAKE | {"state": State.READY, "since_ns": NOW - 9_000 * S},
            "ready for 2 h: wished awake by request",
        ),
        ({"state": State.READY}, "ready for 40 s: wished asleep by deployment, until it is needed"),
        (
            ORDERED | {"state": State.DRAINING, "wish": Wish.HELD},
            "draining for 40 s: what runs there ends; then it sleeps, by operator, until `engine wake`",
        ),
        (AWAKE | {"state": State.DRAINING}, "draining for 40 s: about to be opened again, by request"),
        (
            BROKEN | {"state": State.FAILED},
            f"failed for 40 s: it rests after 5 starts that failed, for 5 min or until `engine wake`{FAILURE}",
        ),
        (
            BROKEN | ORDERED | {"state": State.FAILED, "wish": Wish.HELD},
            "failed for 40 s: wished asleep by operator, until `engine wake`; last failure: no GPU",
        ),
    ],
)
def test_a_line_says_what_a_unit_does_and_what_comes_next(fields: dict[str, Any], words: str) -> None:
    assert told(replace(ASLEEP, **fields), NOW) == words


@pytest.mark.parametrize("left", [{"owner": None}, {"lease_until_ns": NOW}])
def test_one_that_nobody_looks_after_is_said_to_stand_as_it_was_left(left: dict[str, Any]) -> None:
    record = replace(ASLEEP, **AWAKE | left | {"state": State.READY})
    assert not is_kept(record, NOW)
    assert told(record, NOW).startswith("no gateway looks after it; when it was left: ready for 40 s")


def test_only_one_that_is_wished_awake_is_said_to_start_again() -> None:
    failed = replace(ASLEEP, **BROKEN | {"state": State.FAILED})
    assert retry_in_s(failed, NOW) == 290
    assert retry_in_s(replace(failed, wish=Wish.HELD), NOW) is None
    assert retry_in_s(replace(failed, state=State.WARMING), NOW) is None
    assert retry_in_s(failed, failed.retry_at_ns) is None
