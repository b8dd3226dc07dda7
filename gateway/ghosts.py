"""Work in an engine that no ledger knows of: what may be left of requests that have ended here, and what nobody knows.

model_fleet.py tells it each report and each request that ended without the engine's word; it says which ids to abort,
and how many are left that belong to nobody. Pure; times are monotonic seconds.
"""

from collections import OrderedDict
from dataclasses import dataclass

# An engine takes a moment to end what it was told to; sooner, an excess is nothing.
_SETTLES_S = 2.0
# A request that has ended so long ago is not running any more.
_REMEMBERED_S = 900.0
_REMEMBERED_MAX = 512
# An id is named again after this long, for an abort may be lost.
_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """abort: ids that are known to be over. unknown: requests that run there and are nobody's."""

    abort: tuple[str, ...] = ()
    unknown: int = 0


class Ghosts:
    """Of one replica."""

    def __init__(self) -> None:
        self._dead: OrderedDict[str, float] = OrderedDict()  # id → when it was last named, or ended
        self._ended_at: dict[str, float] = {}
        self._excess_since: float | None = None
        self.unknown = 0

    def died(self, rid: str, now: float) -> None:
        """It has ended here, and the engine has not said that it knows."""
        self._dead[rid] = now - _AGAIN_S
        self._ended_at[rid] = now
        while len(self._dead) > _REMEMBERED_MAX:
            del self._ended_at[self._dead.popitem(last=False)[0]]

    def reported(self, *, running: int, known: int, now: float) -> Finding:
        """running: requests in the engine by its own word. known: those that somebody holds."""
        self._forget(now)
        if running <= known:
            self._excess_since = None
            self.unknown = 0
            return Finding()
        if self._excess_since is None:
            self._excess_since = now
        if now - self._excess_since < _SETTLES_S:
            return Finding()
        due = tuple(rid for rid, named_at in self._dead.items() if now - named_at >= _AGAIN_S)
        for rid in due:
            self._dead[rid] = now
        excess = running - known
        self.unknown = max(0, excess - len(self._dead))
        return Finding(due, self.unknown)

    def _forget(self, now: float) -> None:
        for rid in [rid for rid, ended_at in self._ended_at.items() if now - ended_at > _REMEMBERED_S]:
            del self._ended_at[rid]
            del self._dead[rid]
