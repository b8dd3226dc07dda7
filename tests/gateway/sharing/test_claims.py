"""What a process claims of a replica: its peak and a little ahead, what the others leave, never less than it uses."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.gate import Entry, Gate
from gateway.sharing.claims import Ask, ask_of, granted, take
from tests.gateway.test_gate import make_gate, need, started

tokens = st.integers(0, 10_000)


def asked(gate: Gate, *, processes: int = 2, others_hunger: bool = False) -> Ask | None:
    return ask_of(gate, processes=processes, others_hunger=others_hunger)


@given(tokens, tokens, tokens, tokens)
def test_grants_stay_inside_the_pool_but_for_what_is_in_use_already(
    total: int, least: int, wanted: int, others: int
) -> None:
    grant = granted(least, wanted, total=total, others=others)
    assert least <= grant <= max(least, wanted)
    assert grant == least or grant + others <= total


def test_the_peak_is_claimed_and_a_thirty_second_of_the_pool_ahead() -> None:
    gate = make_gate(3200)
    started(gate, need("a", prompt=1000, output=100))
    gate.granted_tokens = 0.0
    ask = asked(gate)
    assert ask is not None
    assert ask.wanted == round(gate.peak()) + 100
    assert ask.least == round(gate.resident_tokens)
    assert not ask.short


def test_nothing_is_asked_while_what_is_granted_will_do_and_is_not_much_too_much() -> None:
    gate = make_gate(3200)
    started(gate, need("a", prompt=1000, output=100))
    peak = round(gate.peak())
    for grant, asks in ((peak + 99.0, True), (peak + 100.0, False), (peak + 300.0, False), (peak + 301.0, True)):
        gate.granted_tokens = grant
        assert (asked(gate) is not None) == asks


def test_who_is_refused_for_the_grants_sake_is_asked_for_and_let_in_when_it_is_granted() -> None:
    gate = make_gate(3200)
    gate.granted_tokens = 100.0
    assert gate.entry(need("a", prompt=1000, output=100), 0.0) is Entry.PAGES
    ask = asked(gate)
    assert ask is not None
    assert ask.short
    assert ask.wanted >= 1100
    assert take(gate, ask, ask.wanted, waits=True)
    assert gate.short_of == 0.0
    assert gate.entry(need("a", prompt=1000, output=100), 0.0) is Entry.NOW


def test_who_was_refused_while_the_board_was_asked_is_for_the_next_claim() -> None:
    gate = make_gate(3200)
    gate.granted_tokens = 100.0
    gate.short_of = 500.0
    assert not take(gate, Ask(0, 150, 0.0, short=False), 100, waits=False)
    assert gate.short_of == 500.0


def test_many_who_share_claim_an_eighth_of_the_pool_ahead_together_and_nothing_where_another_waits() -> None:
    gate = make_gate(3200)
    gate.granted_tokens = 0.0
    ask = asked(gate, processes=16)
    assert ask is not None
    assert ask.wanted * 16 == 3200 // 8
    gate.granted_tokens = 100.0
    hungry = asked(gate, others_hunger=True)
    assert hungry is not None
    assert hungry.wanted == 0


def test_who_does_not_wait_asks_once_and_who_waits_until_it_is_granted() -> None:
    gate = make_gate(3200)
    gate.short_of = 500.0
    take(gate, Ask(0, 600, 500.0, short=True), 300, waits=True)
    assert gate.short_of == 500.0
    take(gate, Ask(0, 600, 500.0, short=True), 300, waits=False)
    assert gate.short_of == 0.0
