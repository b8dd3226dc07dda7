"""How many requests that were let in then waited in the engine's own queue, where turns are not ours.

model_fleet.py tells it how many wait there for pages or a slot, and which of our requests have no first token;
metrics.py reads the count. An engine takes turns by arrival, so those that wait are the last to have come. It says how
many, of all gateways' requests together: each gateway counts its own, as many as wait at the most, and each once. Pure.
"""

from collections.abc import Sequence


class EngineQueue:
    """joined: in all."""

    def __init__(self) -> None:
        self.joined = 0
        self._counted: frozenset[str] = frozenset()

    def reported(self, waiting: int, unstarted: Sequence[str]) -> None:
        """So many wait. unstarted: our requests without a first token that the engine may know, the first at first."""
        last = unstarted[-waiting:] if waiting > 0 else ()
        self.joined += len(set(last) - self._counted)
        self._counted = self._counted.intersection(unstarted).union(last)
