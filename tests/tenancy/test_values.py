"""Values are made cheaply and behave as frozen dataclasses; that nobody changes one is mypy's to say."""

from dataclasses import field, replace

import pytest

from tenancy.values import value


@value
class Point:
    x: int
    names: tuple[str, ...] = field(default=(), compare=False)


def test_equal_fields_make_equal_values_and_hashes() -> None:
    assert Point(1) == Point(1, ("a",)) != Point(2)
    assert len({Point(1), Point(1, ("a",)), Point(2)}) == 2
    assert replace(Point(1, ("a",)), x=3) == Point(3)


def test_there_is_room_for_its_fields_alone() -> None:
    with pytest.raises(AttributeError):
        Point(1).y = 2  # type: ignore[attr-defined]  # the point of the test


def test_assignment_is_refused_by_mypy() -> None:
    point = Point(1)
    point.x = 2  # type: ignore[misc]  # an ignore that mypy doesn't need is an error: this line checks the check
    assert point.x == 2
