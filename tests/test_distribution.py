"""What runs together and first when several workers run the tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distribution import LONGEST, dearest_first, unit

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Item:
    """As much of a test as the order goes by."""

    nodeid: str
    mark: str = ""

    def get_closest_marker(self, name: str) -> Any:
        return name if name == self.mark else None


def test_a_file_stays_together_and_a_folder_with_one_dear_service_too() -> None:
    assert unit("tests/api/test_sse.py::TestFrames::test_one[a::b]") == "tests/api/test_sse.py"
    assert {unit(f"tests/browser/test_{name}.py::test_one") for name in ("pages", "deeds")} == {"tests/browser/"}


def test_the_longest_are_units_that_there_are_and_go_first() -> None:
    assert [name for name in LONGEST if not (ROOT / name).exists()] == []
    first, second = (Item(f"{name}::test_one") for name in LONGEST[:2])
    given: list[Any] = [Item("tests/sglang_cpu/test_a.py::test_one", "sglang"), second, first]
    assert dearest_first(given) == [first, second, given[0]]


def test_dear_files_go_first_and_each_keeps_its_order() -> None:
    cheap, stored = Item("tests/a.py::test_one"), Item("tests/b.py::test_one", "stores")
    before, loaded = Item("tests/c.py::test_one"), Item("tests/c.py::test_two", "load")
    shown, real = Item("tests/browser/test_a.py::test_one", "browser"), Item("tests/sglang_cpu/test_a.py::t", "sglang")
    given: list[Any] = [cheap, stored, before, loaded, shown, real]
    # The browser's are among the longest.
    expected: list[Any] = [shown, real, before, loaded, stored, cheap]
    assert dearest_first(given) == expected


def test_the_order_of_this_run_is_that_one(request: pytest.FixtureRequest) -> None:
    assert dearest_first(request.session.items) == request.session.items
