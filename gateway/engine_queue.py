"""How many requests that were let in then waited in the engine's own queue, where turns are not ours.

fleet.py tells it each report's queue length and each first token; metrics.py reads the count. An engine reports only
lengths: who joined is what the queue gained, and those who took the places of the ones that started meanwhile. Pure.
"""


class EngineQueue:
    """started: first tokens since the last report, counted up by whoever sees them. joined: in all."""

    def __init__(self) -> None:
        self.started = 0
        self.joined = 0
        self._waiting = 0

    def reported(self, waiting: int) -> None:
        """So many wait now."""
        left = min(self._waiting, self.started)
        self.joined += max(0, waiting - self._waiting + left)
        self._waiting = waiting
        self.started = 0
