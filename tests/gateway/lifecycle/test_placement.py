"""Whose memory a waking unit gets: never more than there is, never a busy one's, and nobody sleeps in vain."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.lifecycle.placement import Later, Place, Resident, place
from gateway.lifecycle.states import Unit
from tests.examples import examples

BOX = {"box": 24}
ASKING = Unit("asking", "a")


def resident(name: str, mib: int, needed_at: float, **fields: Any) -> Resident:
    return Resident(Unit(name, "a"), {"box": mib}, needed_at, **fields)


def asked(mib: int, residents: Sequence[Resident], **awake_min: int) -> Place | Later:
    return place(ASKING, {"box": mib}, room=BOX, residents=residents, awake_min=awake_min)


def sleepers(found: Place | Later) -> list[str]:
    assert isinstance(found, Place), found
    return [unit.model for unit in found.sleep]


class TestWhoSleeps:
    def test_nobody_while_there_is_room(self) -> None:
        assert asked(8, [resident("old", 16, 1.0)]) == Place()

    def test_the_least_recently_needed_does(self) -> None:
        assert sleepers(asked(8, [resident("new", 12, 9.0), resident("old", 12, 1.0)])) == ["old"]

    def test_one_whose_memory_is_not_needed_is_spared_though_it_is_older(self) -> None:
        assert sleepers(asked(16, [resident("small", 4, 1.0), resident("large", 18, 9.0)])) == ["large"]

    def test_a_busy_one_never_does(self) -> None:
        assert sleepers(asked(8, [resident("old", 12, 1.0, busy=True), resident("new", 12, 9.0)])) == ["new"]

    def test_a_model_keeps_what_must_be_awake(self) -> None:
        assert sleepers(asked(8, [resident("kept", 12, 1.0), resident("new", 12, 9.0)], kept=1)) == ["new"]

    def test_of_two_units_of_a_model_that_keeps_one_only_one_may(self) -> None:
        both = [Resident(Unit("kept", name), {"box": 8}, 1.0) for name in "ab"]
        assert sleepers(place(ASKING, {"box": 16}, room=BOX, residents=both, awake_min={"kept": 1})) == ["kept"]
        refused = place(ASKING, {"box": 20}, room=BOX, residents=both, awake_min={"kept": 1})
        assert refused == Later("box", 4, None)

    def test_a_sister_never_sleeps_for_it(self) -> None:
        sister = Resident(Unit("asking", "b"), {"box": 24}, 1.0)
        assert isinstance(place(ASKING, {"box": 8}, room=BOX, residents=[sister], awake_min={}), Later)

    def test_one_that_is_starting_stays(self) -> None:
        assert asked(8, [resident("starting", 24, 1.0, steady=False)]) == Later("box", 8, None)

    def test_a_unit_on_another_machine_is_left_alone(self) -> None:
        elsewhere = Resident(Unit("elsewhere", "a"), {"other": 24}, 0.0)
        assert sleepers(asked(8, [elsewhere, resident("here", 24, 1.0)])) == ["here"]

    def test_a_pair_over_two_machines_needs_room_on_both(self) -> None:
        residents = [
            Resident(Unit("one", "a"), {"box": 24}, 1.0),
            Resident(Unit("two", "a"), {"other": 24}, 2.0),
        ]
        room = {"box": 24, "other": 24}
        found = place(ASKING, {"box": 8, "other": 8}, room=room, residents=residents, awake_min={})
        assert sleepers(found) == ["one", "two"]


class TestLater:
    def test_it_says_when_the_busy_one_will_be_free(self) -> None:
        assert asked(8, [resident("busy", 24, 1.0, busy=True, frees_in_s=7.0)]) == Later("box", 8, 7.0)

    def test_memory_on_its_way_out_is_waited_for_and_nobody_else_sleeps(self) -> None:
        leaving = resident("leaving", 12, 1.0, steady=False, leaving=True, frees_in_s=2.0)
        assert asked(12, [leaving, resident("idle", 12, 0.0)]) == Later("box", 12, 2.0)

    def test_a_busy_one_that_must_stay_awake_is_not_waited_for(self) -> None:
        kept = resident("kept", 24, 1.0, busy=True, frees_in_s=7.0)
        assert asked(8, [kept], kept=1) == Later("box", 8, None)


def _residents() -> st.SearchStrategy[list[Resident]]:
    one = st.builds(
        Resident,
        unit=st.builds(Unit, model=st.sampled_from("wxyz"), name=st.sampled_from("abc")),
        memory=st.dictionaries(st.sampled_from(["box", "other"]), st.integers(0, 12), max_size=2),
        needed_at=st.floats(0, 100),
        steady=st.booleans(),
        leaving=st.booleans(),
        busy=st.booleans(),
    )
    return st.lists(one, max_size=7, unique_by=lambda resident: resident.unit)


@settings(max_examples=examples(40))
@given(
    _residents(),
    st.dictionaries(st.sampled_from(["box", "other"]), st.integers(1, 24), min_size=1),
    st.dictionaries(st.sampled_from("wxyz"), st.integers(0, 3)),
)
def test_whatever_lives_there_what_sleeps_is_idle_enough_and_no_more_than_needed(
    residents: list[Resident], memory: dict[str, int], awake_min: dict[str, int]
) -> None:
    room = {"box": 24, "other": 16}
    found = place(ASKING, memory, room=room, residents=residents, awake_min=awake_min)

    def fits_without(units: set[Unit]) -> bool:
        left = [one for one in residents if one.unit not in units]
        return all(size + sum(one.memory.get(pool, 0) for one in left) <= room[pool] for pool, size in memory.items())

    leaving = {one.unit for one in residents if one.leaving}
    may = {one.unit for one in residents if one.idle}
    if isinstance(found, Later):
        assert found.short_mib > 0
        return
    asleep = set(found.sleep)
    assert asleep <= may, "only idle units sleep"
    assert fits_without(asleep | leaving), "it fits afterwards"
    assert not any(fits_without(leaving | asleep - {unit}) for unit in asleep), "nobody sleeps in vain"
    left = Counter(one.unit.model for one in residents if one.steady and not one.leaving and one.unit not in asleep)
    for model in {unit.model for unit in asleep}:
        assert left[model] >= awake_min.get(model, 0), "as many stay awake as must"


@settings(max_examples=examples(40))
@given(_residents(), st.integers(1, 24))
def test_it_only_has_to_wait_if_not_even_all_idle_units_together_would_make_room(
    residents: list[Resident], mib: int
) -> None:
    found = place(ASKING, {"box": mib}, room=BOX, residents=residents, awake_min={})
    if isinstance(found, Later):
        staying = [one for one in residents if not one.idle]
        leaving = any(one.leaving for one in residents)
        assert leaving or mib + sum(one.memory.get("box", 0) for one in staying) > BOX["box"]
