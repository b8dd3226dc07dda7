"""The board of one model: what each gateway process may take of each replica. Implementations stand beside this file.

A process claims the peak of what its own requests will take, and a little ahead, so that decisions stay local and no
request waits for the network. The board grants so much that all grants together stay inside the pool. A claim belongs
to a process, whose lease one heartbeat renews, and to an epoch of the engine: a new epoch voids all claims of the old.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from backends.wire import Loads


@dataclass(frozen=True, slots=True)
class Claim:
    """What a process asks of a replica, in tokens.

    least: in use already, and so granted in any case. wanted: the peak of its requests and what it asks ahead.
    hunger: the service that the account at the head of its queue has had, if that one waits for pages here; None if
    nobody does.
    """

    process: str
    replica: str
    epoch: str
    total: int
    least: int
    wanted: int
    hunger: float | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """tokens: what the process may plan with. epoch: the board's; the claim was void if it is another.

    yields: a hungrier process waits: what ends here is its own from now on.
    """

    epoch: str
    tokens: int
    others: int
    yields: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """polls: engines that this process is to ask for all. dead: processes whose lease has ended, not yet buried.

    others: requests that other processes have at each engine, by their last beat; those of the dead count until then.
    hungry: engines where the head of another process's queue waits for pages.
    """

    polls: frozenset[str]
    dead: tuple[str, ...]
    others: Mapping[str, int]
    hungry: frozenset[str]


@dataclass(frozen=True, slots=True)
class Report:
    """What an engine has said of itself to the process that asks it for all. age_s: since it was asked for."""

    engine: str
    epoch: str
    loads: Loads
    age_s: float


class Board(Protocol):
    """Every method may raise BoardAway: then nothing is known, and the caller goes on with its share."""

    async def claim(self, claim: Claim) -> Grant:
        """Set the process's claim, as far as the others leave room. Growth waits for a hungrier process with less."""

    async def restarted(self, replica: str, before: str, epoch: str) -> None:
        """The engine has started anew: the claims of the epoch before are void. Without effect if that is known."""

    async def beat(self, process: str, running: Mapping[str, int]) -> Beat:
        """Renew the process's lease, and its election as the one that polls these engines.

        running: how many requests it has at each.
        """

    async def report(self, report: Report) -> None:
        """Tell all what an engine has said."""

    async def reports(self, engines: tuple[str, ...]) -> dict[str, Report]:
        """The last that was told of each, with its age by now."""

    async def note_requests(self, process: str, came: dict[str, str], gone: tuple[str, ...]) -> None:
        """Engine ids of its requests that came (with their replica) and that are gone: for whoever buries it."""

    async def estate(self, process: str) -> dict[str, str]:
        """The engine ids that a dead process has left, with their replicas."""

    async def bury(self, process: str, replicas: tuple[str, ...]) -> None:
        """Its requests are stopped and a fresh report was taken: its claims are free."""

    async def served(self, process: str, seconds: dict[str, float]) -> dict[str, float]:
        """Add what accounts were served since the last call; the totals of these accounts over all processes."""

    async def leave(self, process: str, replicas: tuple[str, ...]) -> None:
        """A process that ends well takes its claims along."""


class BoardAway(Exception):
    """The board does not answer."""
