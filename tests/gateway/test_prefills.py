"""Prefills under way: how long they take together, and what is left when one is over."""

from gateway.forecast import EngineSpeed
from gateway.lengths import always
from gateway.need import Need, Running
from gateway.prefills import Prefills

SPEED = EngineSpeed(prefill_tokens_s=1000.0, step_s=0.01)


def running(name: str, tokens: int, *, heard: bool = True, prefilled_by: float = 1.0) -> Running:
    need = Need(name, tokens, 0, tokens, 10, always(10), heard=heard)
    return Running(need, tokens, 10, 20, 0, 0.0, prefilled_by, need.lengths)


def test_they_take_what_all_their_tokens_take_and_nothing_when_all_are_over() -> None:
    prefills = Prefills()
    assert prefills.seconds(SPEED) == 0.0
    for name in ("a", "b"):
        prefills.add(running(name, 500))
    assert prefills.tokens == 1000
    assert prefills.seconds(SPEED) == prefills.seconds_with(running("c", 0).need, SPEED) >= 1.0
    assert prefills.seconds_with(running("c", 500).need, SPEED) > prefills.seconds(SPEED)
    assert prefills.remove("a")
    assert not prefills.remove("a")
    assert [one.need.id for one in prefills] == ["b"]
    prefills.remove("b")
    assert (len(prefills), prefills.tokens, prefills.seconds(SPEED)) == (0, 0, 0.0)


def test_it_says_when_the_first_should_be_over_that_is_not_heard() -> None:
    prefills = Prefills()
    prefills.add(running("heard", 10, prefilled_by=1.0))
    assert prefills.unheard_until() is None
    for name, at in (("late", 3.0), ("soon", 2.0)):
        prefills.add(running(name, 10, heard=False, prefilled_by=at))
    assert prefills.unheard_until() == 2.0
