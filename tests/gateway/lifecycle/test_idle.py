"""Who may sleep: never who is busy, never too many, never for a unit that is still on its way; and who has to wake."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.serverless import Serverless
from gateway.lifecycle.idle import Use, wishes, wishes_of_sides
from gateway.lifecycle.states import By, Depth, Record, StartLimits, State, Unit, Wish, Wished, advance
from tests.examples import examples

SECOND = 1_000_000_000
MONDAY_NOON = int(datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()) * SECOND
TABLE = Serverless(idle_seconds=60)
OFFICE = {"days": "mon-fri", "from": "08:00", "to": "18:00", "replicas_min": 2}


def use(name: str = "a", *, idle_s: float = 100, busy: bool = False, **fields: Any) -> Use:
    """A unit that was ready long ago and last used so many seconds before noon."""
    record = Record(Unit("m", name), state=State.READY, wish=Wish.AWAKE, wish_by=By.REQUEST)
    return Use(replace(record, **fields), busy=busy, used_at_ns=MONDAY_NOON - round(idle_s * SECOND))


def asleep(name: str = "a", **fields: Any) -> Use:
    return use(name, **{"state": State.ASLEEP, "wish": Wish.ASLEEP, "wish_by": By.IDLE} | fields)


def table(**fields: Any) -> Serverless:
    return Serverless.model_validate({"idle_seconds": 60} | fields)


def names(found: list[tuple[Unit, Wished]], wish: Wish = Wish.ASLEEP) -> list[str]:
    assert all(wished.wish is wish for _, wished in found)
    return [unit.name for unit, _ in found]


def ask(serverless: Serverless, *uses: Use, waiting: bool = False, at: int = MONDAY_NOON) -> list[tuple[Unit, Wished]]:
    return wishes(serverless, uses, at, waiting=waiting)


class TestSleep:
    def test_one_that_was_idle_for_long_enough_sleeps_as_deep_as_the_file_says(self) -> None:
        assert ask(table(depth="released"), use()) == [
            (Unit("m", "a"), Wished(Wish.ASLEEP, By.IDLE, Depth.RELEASED)),
        ]

    @pytest.mark.parametrize(
        "kept",
        [
            use(idle_s=59),
            use(busy=True),
            use(idle_s=-5),
            use(since_ns=MONDAY_NOON - 59 * SECOND),
            use(wish_by=By.OPERATOR, wish_since_ns=MONDAY_NOON - 59 * SECOND),
            use(state=State.WARMING),
        ],
        ids=["used lately", "busy", "used in the future", "ready lately", "woken lately", "warming"],
    )
    def test_who_may_still_be_needed_stays(self, kept: Use) -> None:
        assert ask(TABLE, kept) == []

    def test_nobody_sleeps_while_a_request_waits(self) -> None:
        assert ask(TABLE, use("a"), use("b"), waiting=True) == []

    def test_nobody_sleeps_while_another_wakes(self) -> None:
        assert ask(TABLE, use("a"), use("b", state=State.WARMING)) == []
        assert names(ask(TABLE, use("a"), asleep("b"))) == ["a"]

    def test_the_longest_idle_go_first_and_as_many_stay_as_the_file_asks_for(self) -> None:
        units = use("a", idle_s=70), use("b", idle_s=300), use("c", idle_s=90)
        assert names(ask(TABLE, *units)) == ["b", "c", "a"]
        assert names(ask(table(replicas_min=1), *units)) == ["b", "c"]
        assert names(ask(table(replicas_min=3), *units)) == []

    def test_more_stay_awake_in_the_hours_that_a_schedule_names(self) -> None:
        units = use("a", idle_s=70), use("b", idle_s=300), use("c", idle_s=90)
        assert names(ask(table(schedules=[OFFICE]), *units)) == ["b"]
        evening = MONDAY_NOON + 6 * 3600 * SECOND
        assert names(ask(table(schedules=[OFFICE]), *units, at=evening)) == ["b", "c", "a"]

    def test_what_the_file_does_not_allow_sleeps_as_soon_as_it_is_idle(self) -> None:
        units = use("a", idle_s=1), use("b", idle_s=2), use("c", busy=True)
        assert names(ask(table(replicas_max=2), *units)) == ["b"]
        assert names(ask(table(replicas_max=1), use("a", busy=True), use("b", busy=True))) == []

    def test_what_the_scaler_wants_awake_sleeps_only_with_the_whole_model(self) -> None:
        scaled = use("b", wish_by=By.SCALER)
        assert names(ask(TABLE, use("a", busy=True), scaled)) == []
        assert names(ask(TABLE, use("a"), scaled)) == ["a", "b"]


class TestWake:
    def test_as_many_wake_as_a_schedule_asks_for(self) -> None:
        units = asleep("a"), asleep("b", retry_at_ns=5), asleep("c", depth=Depth.RELEASED)
        found = ask(table(schedules=[OFFICE]), *units)
        assert names(found, Wish.AWAKE) == ["c", "a"]
        assert {wished.by for _, wished in found} == {By.SCHEDULE}

    def test_as_many_wake_as_the_file_always_wants(self) -> None:
        [(unit, wished)] = ask(table(replicas_min=1), asleep("a", idle_s=1), asleep("b"))
        assert (unit.name, wished.by) == ("a", By.DEPLOYMENT)

    def test_what_an_operator_put_to_sleep_and_what_has_failed_is_left(self) -> None:
        left = asleep("a", wish=Wish.HELD), asleep("b", wish_by=By.OPERATOR), asleep("c", state=State.FAILED)
        assert ask(table(replicas_min=3), *left) == []
        assert names(ask(table(replicas_min=3), *left, asleep("d")), Wish.AWAKE) == ["d"]

    def test_one_that_has_failed_is_not_awake(self) -> None:
        failed = use("a", state=State.FAILED)
        assert names(ask(table(replicas_min=1), failed, asleep("b")), Wish.AWAKE) == ["b"]


USES = st.builds(
    lambda name, idle_s, busy, fields: use(name, idle_s=idle_s, busy=busy, **fields),
    name=st.sampled_from("abcdef"),
    idle_s=st.floats(0, 200),
    busy=st.booleans(),
    fields=st.fixed_dictionaries(
        {
            "state": st.sampled_from(State),
            "wish": st.sampled_from(Wish),
            "wish_by": st.sampled_from(By),
            "depth": st.sampled_from(Depth),
        }
    ),
)
TABLES = st.builds(
    lambda least, more, schedules: table(replicas_min=least, replicas_max=least + more, schedules=schedules),
    least=st.integers(0, 3),
    more=st.integers(1, 3),
    schedules=st.sampled_from([[], [OFFICE | {"replicas_min": 1}]]),
)


def awake(uses: list[Use]) -> list[Use]:
    return [one for one in uses if one.record.wish is Wish.AWAKE and one.record.state is not State.FAILED]


@settings(max_examples=examples(60))
@given(serverless=TABLES, uses=st.lists(USES, max_size=6, unique_by=lambda one: one.unit), waiting=st.booleans())
def test_whatever_the_units_are_nothing_that_is_needed_sleeps(
    serverless: Serverless, uses: list[Use], *, waiting: bool
) -> None:
    least = serverless.replicas_min_at(datetime.fromtimestamp(MONDAY_NOON / SECOND, UTC))
    known = {one.unit: one for one in uses}
    found = wishes(serverless, uses, MONDAY_NOON, waiting=waiting)
    slept = [known[unit] for unit, wished in found if wished.wish is Wish.ASLEEP]
    if slept:
        assert not waiting
        assert all(one.record.state is State.READY for one in awake(uses))
        assert not any(one.busy for one in slept)
        assert len(awake(uses)) - len(slept) >= least
        over = len(awake(uses)) - (serverless.replicas_max or 0)
        assert sum(MONDAY_NOON - one.idle_since_ns < 60 * SECOND for one in slept) <= max(0, over)
    woken = [known[unit] for unit, wished in found if wished.wish is Wish.AWAKE]
    assert len(awake(uses)) + len(woken) <= max(least, len(awake(uses)))
    # Each wish is heeded, and wishing again changes nothing.
    after = [
        replace(one, record=advance(one.record, dict(found)[one.unit], MONDAY_NOON, StartLimits()))
        if one.unit in dict(found)
        else one
        for one in uses
    ]
    assert all(one.record.wish is dict(found)[one.unit].wish for one in after if one.unit in dict(found))
    assert wishes(serverless, after, MONDAY_NOON, waiting=waiting) == []


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=5), st.integers(0, 3))
def test_a_model_that_nobody_uses_comes_to_rest(idle_s: list[float], least: int) -> None:
    uses = [use(str(number), idle_s=seconds) for number, seconds in enumerate(idle_s)]
    serverless = table(replicas_min=min(least, len(uses)))
    found = wishes(serverless, uses, MONDAY_NOON + 60 * SECOND, waiting=False)
    assert len(found) == len(uses) - serverless.replicas_min


class TestSides:
    def asleep(self, serverless: Serverless, *sides: list[Use], waiting: bool = False) -> list[str]:
        return names(wishes_of_sides(serverless, sides, MONDAY_NOON, waiting=waiting))

    def test_the_last_half_of_a_side_stays_while_the_other_side_works(self) -> None:
        prefill = [use("p0", idle_s=200), use("p1", idle_s=100)]
        assert self.asleep(TABLE, prefill, [use("d0", busy=True)]) == ["p0"]
        assert self.asleep(TABLE, prefill, [use("d0", idle_s=59)]) == ["p0"]
        assert self.asleep(TABLE, prefill, [use("d0", state=State.WARMING)]) == ["p0"]

    def test_all_halves_sleep_together_once_all_are_idle(self) -> None:
        prefill = [use("p0", idle_s=200), use("p1", idle_s=100)]
        assert self.asleep(TABLE, prefill, [use("d0")]) == ["p0", "p1", "d0"]
        assert self.asleep(TABLE, prefill, [asleep("d0")]) == ["p0", "p1"]
        assert self.asleep(TABLE, prefill, [use("d0")], waiting=True) == []

    def test_the_file_s_least_is_of_each_side(self) -> None:
        least = table(replicas_min=1)
        assert self.asleep(least, [use("p0", idle_s=200), use("p1")], [use("d0")]) == ["p0"]
        found = wishes_of_sides(least, [[asleep("p0")], [asleep("d0")]], MONDAY_NOON, waiting=False)
        assert names(found, Wish.AWAKE) == ["p0", "d0"]
