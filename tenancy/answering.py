"""Whether the database answers, as concluded from calls in trouble and from probes. Pure; database.py acts on it.

Calls end in any order: one that was stuck may fail long after the database answers again, and one that began in good
times may end well while nobody else is answered. So a call in trouble says no more than that a probe is due. A probe
asks afresh and alone, and it alone decides.
"""

from dataclasses import dataclass
from enum import Enum, auto


class Standing(Enum):
    """DOUBTED: some call was in trouble, and no probe has decided yet; work goes on as while it answers."""

    ANSWERS = auto()
    DOUBTED = auto()
    AWAY = auto()


class Change(Enum):
    WENT = auto()
    CAME_BACK = auto()


@dataclass(slots=True)
class Answering:
    """One database as one process sees it."""

    standing: Standing = Standing.ANSWERS
    _doubted_since_asked: bool = False

    def doubt(self) -> bool:
        """A call failed for the database's sake, or waits for long. Returns whether probing has to begin."""
        self._doubted_since_asked = True
        if self.standing is not Standing.ANSWERS:
            return False
        self.standing = Standing.DOUBTED
        return True

    def asked(self) -> None:
        """A probe begins: what it finds is newer than every doubt so far."""
        self._doubted_since_asked = False

    def found(self, *, answered: bool) -> Change | None:
        """What a probe found, or that it takes too long. While this is not ANSWERS afterwards, another probe is due."""
        before = self.standing
        if not answered:
            self.standing = Standing.AWAY
            return None if before is Standing.AWAY else Change.WENT
        # Trouble after the question may be newer than the answer.
        self.standing = Standing.DOUBTED if self._doubted_since_asked else Standing.ANSWERS
        return Change.CAME_BACK if before is Standing.AWAY else None
