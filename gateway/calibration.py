"""How good were the forecasts? Counts, of decisions that let a request in, those whose true peak stayed below.

placing.py hands in the decision and, later, each request's true length; metrics.py and the replay's report read the
shares. The truth is that of the decision's own question: the peak if nobody else had come. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.forecast import peak_tokens

# Decisions whose truth is still out; further ones are not sampled.
_OPEN_MAX = 256


@dataclass(frozen=True, slots=True)
class Inside:
    """A request at the time of a decision: its tokens then, what each choice had produced, and how many choices."""

    id: str
    resident: int
    produced: int
    choices: int = 1


@dataclass(slots=True)
class _Decision:
    bound: float
    unknown: dict[str, Inside]
    known: list[tuple[int, int]] = field(default_factory=list)


class Coverage:
    """every: of so many decisions one is followed to its end."""

    def __init__(self, *, every: int = 1) -> None:
        assert every >= 1, "a share of the decisions"
        self.decisions = 0
        self.covered = 0
        self._every = every
        self._until = 1
        self._open: dict[str, list[_Decision]] = {}  # by the requests whose length is out
        self._count = 0

    @property
    def share(self) -> float:
        """Of the decisions whose truth is known; 1 of none."""
        return self.covered / self.decisions if self.decisions else 1.0

    def wants(self) -> bool:
        """Is the next decision to be followed?"""
        self._until -= 1
        if self._until > 0 or self._count >= _OPEN_MAX:
            return False
        self._until = self._every
        return True

    def decided(self, bound: float, inside: Iterable[Inside]) -> None:
        """bound: the forecast's quantile of the peak. inside: with the request that was let in."""
        decision = _Decision(bound, {each.id: each for each in inside})
        self._count += 1
        for request_id in decision.unknown:
            self._open.setdefault(request_id, []).append(decision)

    def ended(self, request_id: str, length: int) -> None:
        """A request has left its engine after `length` tokens of each choice."""
        for decision in self._open.pop(request_id, ()):
            each = decision.unknown.pop(request_id)
            left = max(0, length - each.produced)
            decision.known.append((each.resident, left * each.choices))
            if not decision.unknown:
                self._count -= 1
                self.decisions += 1
                self.covered += peak_tokens(decision.known) <= decision.bound
