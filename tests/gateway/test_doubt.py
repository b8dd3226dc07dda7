"""Trust in what accounts' answers come to: who loses it, how far, and how it grows back."""

from gateway.doubt import PARTS, Doubt


def test_nobody_is_doubted_before_an_engine_took_pages_back() -> None:
    doubt = Doubt(300.0)
    doubt.tick(1.0)
    assert (len(doubt), doubt.of("a")) == (0, 0)


def test_who_ran_past_what_was_foreseen_loses_half_of_the_trust_and_nobody_else() -> None:
    doubt = Doubt(300.0)
    assert doubt.retracted({"long": 4000, "a-little": 30, "as-foreseen": 0}) == {"long"}
    assert [doubt.of(name) for name in ("long", "a-little", "as-foreseen")] == [PARTS // 2, 0, 0]


def test_two_that_share_the_cause_are_both_doubted() -> None:
    assert Doubt(300.0).retracted({"one": 500, "other": 500}) == {"one", "other"}


def test_when_all_were_as_foreseen_nobody_is_blamed() -> None:
    doubt = Doubt(300.0)
    assert doubt.retracted({"a": 0, "b": 0}) == doubt.retracted({}) == frozenset()
    assert len(doubt) == 0


def test_trust_halves_until_ceilings_are_planned_with() -> None:
    doubt = Doubt(300.0)
    parts = [doubt.of("a") for _ in range(5) if doubt.retracted({"a": 1})]
    assert parts == [4, 6, 7, 8, 8]


def test_trust_grows_back_evenly_and_is_then_whole() -> None:
    doubt = Doubt(300.0)
    doubt.tick(1000.0)
    doubt.retracted({"a": 1})
    parts = []
    for now in range(1000, 1200, 40):
        doubt.tick(float(now))
        parts.append(doubt.of("a"))
    assert parts == [4, 3, 2, 1, 0]
    assert len(doubt) == 0


def test_with_no_time_to_grow_back_nobody_is_doubted() -> None:
    doubt = Doubt(0.0)
    assert doubt.retracted({"a": 1}) == frozenset()
    doubt.tick(1.0)
    assert doubt.of("a") == 0


def test_very_many_doubted_accounts_push_out_the_first() -> None:
    doubt = Doubt(300.0)
    for number in range(2000):
        doubt.retracted({f"t{number}": 1})
    assert len(doubt) == 1024
    assert (doubt.of("t0"), doubt.of("t1999")) == (0, 4)
