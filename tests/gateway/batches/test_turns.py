"""Whose line is next, and when there is room for one."""

import pytest

from gateway.batches.turns import has_room, next_turn
from tests.gateway.batches.made import batch


def test_nobody_is_next_where_nobody_waits() -> None:
    assert next_turn([], {}, {}) is None


def test_an_account_with_many_batches_gets_no_more_turns_than_one_with_one() -> None:
    ready = [batch("a1", account="a"), batch("a2", account="a"), batch("a3", account="a"), batch("b1", account="b")]
    running: dict[str, int] = {}
    served: dict[str, int] = {}
    turns = []
    for turn in range(8):
        chosen = next_turn(ready, running, served)
        assert chosen is not None
        served[chosen.account_id] = turn
        running[chosen.account_id] = running.get(chosen.account_id, 0) + 1
        turns.append(chosen.id)
    assert turns == ["a1", "b1"] * 4


def test_whoever_has_fewer_lines_running_is_next() -> None:
    ready = [batch("a1", account="a"), batch("b1", account="b")]
    chosen = next_turn(ready, {"a": 2, "b": 1}, {"a": 0, "b": 5})
    assert chosen is ready[1]


@pytest.mark.parametrize(
    ("shares", "waiting", "room"),
    [
        ([1.0], 0, True),
        ([1.0], 1, False),
        ([0.25], 0, False),
        ([0.26], 0, True),
        ([0.0, 0.1, 0.9], 0, True),
        ([], 0, False),
    ],
)
def test_a_line_begins_only_in_idle_capacity(shares: list[float], waiting: int, room: bool) -> None:  # noqa: FBT001 - what is expected
    assert has_room(shares, waiting=waiting, idle_share=0.25) is room
