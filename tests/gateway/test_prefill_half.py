"""Which prefill half takes a prompt: the soonest, one that knows its prefix for a bounded delay, none that is full."""

import random

import pytest

from gateway.forecast import EngineSpeed
from gateway.prefill_half import PrefillHalf, Prompt, Quote, choose
from gateway.prefixes import Prefixes

RATE = 1000.0  # tokens a second


def half(name: str, *, ahead: int = 8192, room: bool = True) -> PrefillHalf:
    speed = EngineSpeed(prefill_tokens_s=RATE, step_s=0.01)
    return PrefillHalf(name, Prefixes(100_000), speed, ahead, lambda tokens, choices: room, open=True)


def prompt(tokens: int = 1000, *, blocks: tuple[int, ...] = (), last_at: str = "", choices: int = 1) -> Prompt:
    return Prompt(tokens, choices, blocks, last_at, believed=1.0)


def enter(name: str, at: PrefillHalf, asked: Prompt) -> None:
    at.enter(name, at.quote(asked), asked.blocks)


def chosen(halves: list[PrefillHalf], asked: Prompt, *, delay_s_max: float = 1.0) -> Quote:
    quote = choose(halves, asked, delay_s_max=delay_s_max)
    assert quote is not None, "some half takes it"
    return quote


def test_the_half_whose_backlog_is_computed_soonest_takes_it_by_its_own_speed() -> None:
    slow, fast = half("slow"), half("fast")
    for _ in range(2000):
        slow.speed.observe_prefill(1000, 0.0, 10.0)
    assert chosen([slow, fast], prompt()).half is fast
    for number in range(3):
        enter(f"r{number}", fast, prompt())
    assert chosen([slow, fast], prompt()).half is fast  # four thousand tokens there are sooner than one here
    idle = half("idle")
    quote = chosen([slow, fast, idle], prompt())
    assert quote.half is idle
    assert quote.in_s == pytest.approx(1.0)


def test_a_half_that_knows_the_prefix_goes_first_until_it_delays_the_prompt_too_much() -> None:
    knows, other = half("knows"), half("other")
    enter("before", knows, prompt(blocks=(1, 2)))
    knows.leave("before")
    again = prompt(1200, blocks=(1, 2))
    assert chosen([other, knows], again).half is knows
    assert chosen([other, knows], again).uncached == 1200 - 1024
    for number in range(2):
        enter(f"r{number}", knows, prompt())
    assert chosen([other, knows], again, delay_s_max=2.0).half is knows
    assert chosen([other, knows], again, delay_s_max=0.5).half is other


def test_the_last_half_of_a_session_goes_first_where_no_prefix_is_known() -> None:
    halves = [half("a"), half("b")]
    assert chosen(halves, prompt(last_at="b")).half.id == "b"


def test_what_is_not_believed_to_be_cached_is_computed_and_so_are_the_prompts_of_several_choices() -> None:
    knows = half("knows")
    enter("before", knows, prompt(blocks=(1,)))
    knows.leave("before")
    assert knows.quote(Prompt(1000, 1, (1,), believed=0.5)).uncached == 1000 - 256
    assert knows.quote(Prompt(1000, 3, (1,), believed=1.0)).uncached == 3000


def test_none_takes_it_that_is_closed_has_no_pages_or_a_full_batch() -> None:
    closed = half("closed")
    closed.open = False
    crowded = half("crowded", ahead=1500)
    enter("r", crowded, prompt())
    assert choose([closed, half("full", room=False), crowded], prompt(), delay_s_max=1.0) is None
    assert chosen([crowded], prompt(500)).half is crowded
    crowded.leave("r")
    assert chosen([crowded], prompt(9000)).half is crowded  # larger than any batch, it goes alone


def test_a_half_on_trial_has_one_prompt_at_a_time() -> None:
    tried = half("tried")
    tried.on_trial = True
    enter("r", tried, prompt())
    assert choose([tried], prompt(), delay_s_max=1.0) is None
    tried.leave("r")
    tried.leave("r")
    assert chosen([tried], prompt()).half is tried


def test_random_comings_and_goings_leave_nothing_behind() -> None:
    draw = random.Random(7)
    one, inside = half("one", ahead=1 << 40), list[str]()
    for number in range(2000):
        if inside and draw.random() < 0.5:
            one.leave(inside.pop(draw.randrange(len(inside))))
        else:
            blocks = tuple(range(draw.randrange(4)))
            enter(f"r{number}", one, prompt(draw.randrange(1, 5000), blocks=blocks))
            inside.append(f"r{number}")
        assert one.prefilling_s() >= 0
        assert len(one) == len(inside)
    for name in inside:
        one.leave(name)
    assert (len(one), one.prefilling_s()) == (0, 0.0)
    assert one.quote(prompt()).in_s == pytest.approx(1.0)
