"""What calls in trouble and probes say about a database, in every order in which they can come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenancy.answering import Answering, Change, Standing


def _away() -> Answering:
    answering = Answering()
    answering.doubt()
    answering.asked()
    assert answering.found(answered=False) is Change.WENT
    return answering


def test_a_call_in_trouble_is_a_doubt_and_one_probe_begins() -> None:
    answering = Answering()
    assert answering.doubt()
    assert not answering.doubt()
    assert answering.standing is Standing.DOUBTED


def test_a_doubt_that_a_probe_dispels_is_no_change() -> None:
    answering = Answering()
    answering.doubt()
    answering.asked()
    assert answering.found(answered=True) is None
    assert answering.standing is Standing.ANSWERS


def test_a_database_that_hangs_is_found_though_every_call_began_in_good_times() -> None:
    answering = Answering()
    answering.doubt()
    answering.asked()
    assert answering.found(answered=False) is Change.WENT  # the probe takes too long
    assert answering.standing is Standing.AWAY


def test_a_probe_that_hung_and_is_answered_in_the_end_says_that_it_is_back() -> None:
    answering = _away()
    assert answering.found(answered=True) is Change.CAME_BACK
    assert answering.standing is Standing.ANSWERS


def test_stuck_calls_that_end_badly_after_it_is_back_change_nothing_once_probed() -> None:
    answering = _away()
    answering.found(answered=True)
    for _stuck_call in range(4):
        answering.doubt()
    answering.asked()
    assert answering.found(answered=True) is None
    assert answering.standing is Standing.ANSWERS


@pytest.mark.parametrize("away", [False, True])
def test_trouble_after_the_question_wants_another_probe(away: bool) -> None:  # noqa: FBT001 - a parameter of pytest
    answering = _away() if away else Answering()
    answering.doubt()
    answering.asked()
    answering.doubt()
    assert answering.found(answered=True) is (Change.CAME_BACK if away else None)
    assert answering.standing is Standing.DOUBTED
    answering.asked()
    assert answering.found(answered=False) is Change.WENT


@given(st.lists(st.sampled_from(["doubt", "asked", "answered", "silent"]), max_size=40))
def test_changes_alternate_and_no_doubt_alone_is_one(events: list[str]) -> None:
    answering, changes = Answering(), []
    for event in events:
        before = answering.standing
        if event == "doubt":
            answering.doubt()
            assert (answering.standing is Standing.AWAY) == (before is Standing.AWAY)
        elif event == "asked":
            answering.asked()
        elif (change := answering.found(answered=event == "answered")) is not None:
            changes.append(change)
    assert changes == [Change.WENT if index % 2 == 0 else Change.CAME_BACK for index in range(len(changes))]
    assert (answering.standing is Standing.AWAY) == (len(changes) % 2 == 1)
