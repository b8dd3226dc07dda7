"""Calls come out of the text the same wherever the text is cut."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.local.tool_calls import ArgumentsGrew, CallBegan, Said, ToolCallReader

ARGUMENTS = ['{"city": "Oslo"}', '{"a": [1, {"b": "}\\"]"}], "c": "</tool_call>"}', "{}"]
CALLS = "\n".join(
    f'<tool_call>{{"name": "f{at}", "arguments": {text}}}</tool_call>' for at, text in enumerate(ARGUMENTS)
)


def read(text: str, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, str]], ToolCallReader]:
    """What is said, the calls' names and arguments, and the reader."""
    reader = ToolCallReader()
    said = ""
    calls: dict[int, list[str]] = {}
    edges = [0, *sorted(cuts or []), len(text)]
    pieces = [piece for begin, end in pairwise(edges) for piece in reader.read(text[begin:end])]
    for piece in [*pieces, *reader.rest()]:
        match piece:
            case Said():
                assert piece.text
                said += piece.text
            case CallBegan():
                assert piece.index == len(calls)
                calls[piece.index] = [piece.name, ""]
            case ArgumentsGrew():
                assert piece.text
                calls[piece.index][1] += piece.text
    return said, [(name, arguments) for name, arguments in calls.values()], reader


WHOLE = [(f"f{at}", text) for at, text in enumerate(ARGUMENTS)]


@given(st.lists(st.integers(0, len(CALLS) + 11)))
def test_cuts_change_nothing(cuts: list[int]) -> None:
    said, calls, reader = read(f"I'll look. {CALLS}", cuts)
    assert (said, calls, reader.unfinished) == ("I'll look. ", WHOLE, False)


def test_every_single_character_is_a_good_cut() -> None:
    text = f"a <b> <tool {CALLS}"
    assert read(text, list(range(len(text))))[:2] == ("a <b> <tool ", WHOLE)


@pytest.mark.parametrize("text", ["", "Just text.", "a < b", "ends with <tool", "<tool_cal", "<<<tool_call"])
def test_text_without_calls_is_said_whole(text: str) -> None:
    said, calls, reader = read(text, list(range(len(text))))
    assert (said, calls, reader.unfinished) == (text, [], False)


@given(st.integers(len("<tool_call>"), len(CALLS.split("\n")[0]) - 1))
def test_a_call_that_was_cut_is_known_to_be_unfinished(end: int) -> None:
    said, calls, reader = read(CALLS[:end])
    assert said == ""
    assert reader.unfinished
    assert all(ARGUMENTS[0].startswith(arguments) for _, arguments in calls)


def test_ids_are_never_the_same() -> None:
    ids: set[Any] = set()
    for _ in range(100):
        ids |= {piece.id for piece in ToolCallReader().read(CALLS) if isinstance(piece, CallBegan)}
    assert len(ids) == 300
