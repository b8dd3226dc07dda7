"""Between which numbers a model's units move, by the deployment file and the time."""

from datetime import UTC, datetime

from api.scaling import bounds_of
from backends.serverless import Schedule, Serverless
from gateway.lifecycle.scaling import Bounds

MONDAY = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)


def test_nothing_is_ours_to_wake_without_the_table_or_without_units() -> None:
    assert bounds_of(None, 3, MONDAY) is None
    assert bounds_of(Serverless(), 0, MONDAY) is None


def test_the_file_s_numbers_count_as_far_as_there_are_units() -> None:
    assert bounds_of(Serverless(), 3, MONDAY) == Bounds(0, 3)
    assert bounds_of(Serverless(replicas_min=1, replicas_max=2), 3, MONDAY) == Bounds(1, 2)
    assert bounds_of(Serverless(replicas_min=2, replicas_max=4), 1, MONDAY) == Bounds(1, 1)


def test_a_schedule_counts_while_it_lasts() -> None:
    office = Schedule.model_validate({"days": "mon-fri", "from": "08:00", "to": "18:00", "replicas_min": 2})
    table = Serverless(schedules=(office,))
    assert bounds_of(table, 3, MONDAY) == Bounds(2, 3)
    assert bounds_of(table, 3, MONDAY.replace(hour=20)) == Bounds(0, 3)
