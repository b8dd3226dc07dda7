"""`make test` draws the same examples of a property in every run, whatever else its process has imported."""

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MODULE = "numbers_that_hypothesis_would_draw"


def drawn() -> list[list[int]]:
    found = []

    @given(st.lists(st.integers()))
    def note(numbers: list[int]) -> None:
        found.append(numbers)

    note()
    return found


@pytest.mark.skipif("not __import__('hypothesis').settings().derandomize", reason="a search draws at random")
def test_a_module_that_was_imported_changes_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    assert len(before) == settings().max_examples
    (tmp_path / f"{MODULE}.py").write_text(f"NUMBERS = {list(range(10_000, 10_400))}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(MODULE)
    assert drawn() == before
