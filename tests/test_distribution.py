"""What runs together and first when several workers run the tests."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.distribution import dearest_first, unit


@dataclass(frozen=True)
class Item:
    """As much of a test as the order goes by."""

    nodeid: str
    mark: str = ""

    def get_closest_marker(self, name: str) -> Any:
        return name if name == self.mark else None


def test_a_file_stays_together_and_a_folder_with_one_dear_server_too() -> None:
    assert unit("tests/api/test_sse.py::TestFrames::test_one[a::b]") == "tests/api/test_sse.py"
    of_sglang = {unit(f"tests/sglang_cpu/test_{name}.py::test_one") for name in ("real_pair", "server")}
    assert of_sglang == {"tests/sglang_cpu/"}


def test_dear_files_go_first_and_each_keeps_its_order() -> None:
    cheap, stored = Item("tests/a.py::test_one"), Item("tests/b.py::test_one", "stores")
    before, loaded = Item("tests/c.py::test_one"), Item("tests/c.py::test_two", "load")
    shown, real = Item("tests/browser/test_a.py::test_one", "browser"), Item("tests/sglang_cpu/test_a.py::t", "sglang")
    given: list[Any] = [cheap, stored, before, loaded, shown, real]
    expected: list[Any] = [real, shown, before, loaded, stored, cheap]
    assert dearest_first(given) == expected


def test_the_order_of_this_run_is_that_one(request: pytest.FixtureRequest) -> None:
    assert dearest_first(request.session.items) == request.session.items
