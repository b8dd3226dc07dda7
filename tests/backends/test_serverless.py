"""When a model's engines may sleep: schedules at their borders, and what can't be meant."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from backends.serverless import Schedule, Serverless

MONDAY = datetime(2026, 11, 30, tzinfo=UTC)


def at(day: int, hour: int, minute: int = 0) -> datetime:
    """day 0 is a Monday."""
    return MONDAY + timedelta(days=day, hours=hour, minutes=minute)


def schedule(days: str = "mon-sun", begins: str = "08:00", ends: str = "18:00", least: int = 1) -> Schedule:
    return Schedule.model_validate({"days": days, "from": begins, "to": ends, "replicas_min": least})


class TestSchedules:
    @pytest.mark.parametrize(
        ("when", "covered"),
        [
            (at(0, 7, 59), False),
            (at(0, 8), True),
            (at(4, 17, 59), True),
            (at(4, 18), False),
            (at(5, 12), False),
        ],
    )
    def test_office_hours_end_before_their_last_minute(self, when: datetime, *, covered: bool) -> None:
        assert schedule("mon-fri").covers(when) == covered

    @pytest.mark.parametrize(
        ("when", "covered"),
        [
            (at(4, 21, 59), False),
            (at(4, 22), True),
            (at(5, 5, 59), True),
            (at(5, 6), False),
            (at(4, 5), False),
            (at(5, 22), False),
        ],
    )
    def test_a_night_belongs_to_the_day_on_which_it_begins(self, when: datetime, *, covered: bool) -> None:
        assert schedule("fri", "22:00", "06:00").covers(when) == covered

    def test_a_range_of_days_may_pass_the_weeks_end(self) -> None:
        assert [schedule("sat-mon").covers(at(day, 12)) for day in range(7)] == [True] + [False] * 4 + [True] * 2

    def test_days_and_ranges_may_be_listed(self) -> None:
        assert [schedule("mon, wed-thu").covers(at(day, 12)) for day in range(5)] == [True, False, True, True, False]

    @given(minute=st.integers(0, 7 * 24 * 60 - 1))
    def test_a_whole_day_has_no_gap_at_midnight(self, minute: int) -> None:
        assert schedule(begins="00:00", ends="24:00").covers(MONDAY + timedelta(minutes=minute))

    @given(
        minute=st.integers(0, 7 * 24 * 60 - 1),
        begins=st.integers(0, 1439),
        ends=st.integers(0, 1439),
    )
    def test_a_time_and_its_complement_cover_each_minute_once(self, minute: int, begins: int, ends: int) -> None:
        one, other = (f"{value // 60:02}:{value % 60:02}" for value in (begins, ends))
        if begins == ends:
            return
        when = MONDAY + timedelta(minutes=minute)
        assert schedule(begins=one, ends=other).covers(when) != schedule(begins=other, ends=one).covers(when)

    def test_the_most_that_is_asked_for_now_counts(self) -> None:
        table = Serverless(replicas_min=1, schedules=(schedule(least=3), schedule("sun", least=2)))
        assert [table.replicas_min_at(at(0, hour)) for hour in (7, 8, 18)] == [1, 3, 1]
        assert table.replicas_min_at(at(6, 12)) == 3
        assert table.replicas_min_ever == 3


class TestFaults:
    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"idle_seconds": 0}, "greater than or equal to 1"),
            ({"replicas_min": 3, "replicas_max": 2}, "replicas_min 3 is over replicas_max 2"),
            (
                {"schedules": [{"from": "08:00", "to": "08:00", "replicas_min": 1}]},
                "a whole day is from 00:00 to 24:00",
            ),
            ({"schedules": [{"from": "08:00", "to": "25:00", "replicas_min": 1}]}, "a time is HH:MM"),
            (
                {"schedules": [{"days": "monday", "from": "08:00", "to": "9:00", "replicas_min": 1}]},
                "days are mon, tue, wed, thu, fri, sat, sun, and ranges",
            ),
            (
                {"replicas_max": 1, "schedules": [{"from": "08:00", "to": "09:00", "replicas_min": 2}]},
                "replicas_min 2 is over replicas_max 1",
            ),
            ({"sleep": True}, "Extra inputs are not permitted"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, fields: dict[str, Any], said: str) -> None:
        with pytest.raises(ValidationError, match=said):
            Serverless.model_validate(fields)

    def test_no_more_units_can_be_awake_than_there_are(self) -> None:
        assert Serverless(replicas_min=1, replicas_max=2).fault(units=2) is None
        assert "replicas_max 2 is more than the 1" in str(Serverless(replicas_max=2).fault(units=1))
