"""How often a condition is looked at, and when it is given up."""

import pytest

from tests.doubles.waiting import POLL_S, POLL_S_MAX, eventually, eventually_async, pause_s


def test_a_cheap_condition_is_looked_at_often_and_a_dear_one_a_tenth_of_the_time() -> None:
    assert pause_s(0.0, POLL_S) == POLL_S
    assert pause_s(0.004, POLL_S) == pytest.approx(0.036)
    assert pause_s(3.0, POLL_S) == POLL_S_MAX


async def test_a_condition_is_looked_at_until_it_holds() -> None:
    looks = iter([False, False, True])
    await eventually(lambda: next(looks))
    assert list(looks) == []


async def test_one_that_never_holds_fails_the_test_and_says_what_was_waited_for() -> None:
    async def never() -> bool:
        return False

    with pytest.raises(AssertionError, match=r"rain did not come true within 0\.01 s"):
        await eventually_async(never, within_s=0.01, what="rain")
