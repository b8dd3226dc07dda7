"""What the runner asks of a dialect: to read a file's lines, to run one, and to say what becomes of those it can't run.

The protocols of runner.py; the dialects implement them.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from billing.usage import TokenUsage
from gateway.batches.batch import Batch, Line, NewLine
from gateway.batches.line_rows import Undone
from tenancy.values import value


@value
class Answered:
    """It is over. good: as its maker wanted; else the answer says what was wrong with it."""

    answer: bytes
    good: bool
    usage: TokenUsage


@value
class Later:
    """Nothing was done: there is no room now for anybody of the model, or for the account alone."""

    after_s: float
    account_alone: bool


@value
class Fruitless:
    """An engine failed before it produced anything. answer: what the line says if it may not be tried again."""

    answer: bytes
    after_s: float


@value
class Cut:
    """It was stopped from our side, in a shutdown: what became of it is in its usage record."""


LineEnd = Answered | Later | Fruitless | Cut

Keep = Callable[[bytes], Awaitable[None]]


class LineReader(Protocol):
    """Reads the lines of one file in order."""

    errors: list[dict[str, Any]]

    def see(self, number: int, text: bytes) -> NewLine | None:
        """The line, numbered from 0; None where it is wrong, which is then an error more."""

    def end(self) -> str:
        """All lines were seen: the model that all of them name; without one that is an error, too."""


class Form(Protocol):
    async def run(self, batch: Batch, line: Line, keep: Keep, begun: Callable[[], None]) -> LineEnd:
        """Run it to its end. begun: it has been let in. keep: what it says, awaited before its usage record ends."""

    def unrun(self, batch: Batch, line: Undone) -> bytes:
        """What a line says that never ran."""

    def lost(self, batch: Batch, line: Line) -> bytes:
        """What a line says whose process died when it had produced something."""


Forms = Callable[[Batch], Form]
