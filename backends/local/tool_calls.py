"""Reads tool calls out of an answer's text as it comes: what is said, and which calls with which arguments.

The grammar held the text to its form (backends/tool_marks.py), so there is nothing to repair here: a call that breaks
off was cut by the token limit. replies.py turns the pieces into OpenAI's deltas.
"""

import uuid
from dataclasses import dataclass
from enum import Enum, auto

from backends.tool_marks import ARGUMENTS_KEY, BETWEEN, CLOSE, NAME_KEY, OPEN


@dataclass(frozen=True, slots=True)
class Said:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGrew:
    index: int
    text: str


Piece = Said | CallBegan | ArgumentsGrew


class _State(Enum):
    SAYING = auto()
    NAMING = auto()
    ARGUING = auto()
    CLOSING = auto()


class ToolCallReader:
    """One answer's. `read` gives what became certain with this text, `rest` what was kept back at the end."""

    def __init__(self) -> None:
        self._state = _State.SAYING
        self._held = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.calls = 0

    @property
    def unfinished(self) -> bool:
        """The answer stopped inside of a call."""
        return self._state is not _State.SAYING

    def read(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while (found := self._advance()) is not None:
            pieces += found
        return pieces

    def rest(self) -> list[Piece]:
        """At the end: a mark that never became whole is text after all. Half a call's name is nobody's."""
        held, self._held = self._held, ""
        return [Said(held)] if held and self._state is _State.SAYING and not self.calls else []

    def _advance(self) -> list[Piece] | None:
        """One move of the automaton, None if it needs more text."""
        match self._state:
            case _State.SAYING:
                return self._saying()
            case _State.NAMING:
                return self._naming()
            case _State.ARGUING:
                return self._arguing()
            case _State.CLOSING:
                return self._closing()

    def _saying(self) -> list[Piece] | None:
        before, mark, after = self._held.partition(OPEN)
        if mark:
            self._state, self._held = _State.NAMING, after
        else:
            kept = _beginning_of(OPEN, self._held)
            before, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
            if not before:
                return None
        # Between calls there is nothing but the form's own line break.
        said = "" if self.calls and before in ("", BETWEEN) else before
        return [Said(said)] if said else []

    def _naming(self) -> list[Piece] | None:
        name, mark, after = self._held.removeprefix(NAME_KEY).partition(ARGUMENTS_KEY)
        if not mark:
            return None
        self._state, self._held, self._depth = _State.ARGUING, after, 0
        self.calls += 1
        return [CallBegan(self.calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)]

    def _arguing(self) -> list[Piece] | None:
        """Arguments are an object: they end with the bracket that closes it."""
        if not self._held:
            return None
        end = self._end_of_object()
        text, self._held = self._held[:end], self._held[end:]
        if self._depth == 0:
            self._state = _State.CLOSING
        return [ArgumentsGrew(self.calls - 1, text)]

    def _end_of_object(self) -> int:
        for at, letter in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return len(self._held)

    def _closing(self) -> list[Piece] | None:
        mark = "}" + CLOSE
        if len(self._held) < len(mark):
            return None
        self._state, self._held = _State.SAYING, self._held.removeprefix(mark)
        return []


def _beginning_of(mark: str, text: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
