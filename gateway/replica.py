"""One engine of a fleet, or one of its data-parallel ranks: its client, what is promised there, and its last report.

Kept and asked by model_fleet.py. Whether a request fits is the door's decision; here are the pages that it then holds.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from backends import pairs
from backends.client import EngineClient
from backends.engine_figures import EngineFigures
from backends.wire import Loads, ServerInfo
from gateway.admission import pages_for
from gateway.engine_queue import EngineQueue
from gateway.ghosts import Ghosts
from gateway.health import HealthLimits, ReplicaHealth, Standing
from gateway.hold import PageLedger
from gateway.regions import DEFAULT_REGION, allows
from gateway.want import Want
from tenancy.values import value

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine's own report, with the moment it was first asked for (monotonic seconds): holds taken later are not in
    it. told_at: as of Loads. held_pages: by the ledger, of the holds that may be in it.
    """

    taken_at: float
    total_pages: int
    used_pages: int
    running: int
    waiting: int
    running_max: int
    told_at: float | None = None
    held_pages: int = 0

    def is_repeated_by(self, loads: Loads) -> bool:
        """Is it the same report once more? One that does not say when it was written is taken to be new."""
        return loads.told_at is not None and loads.told_at == self.told_at


@value
class Served:
    """What a replica serves of its model. revision: its name in the deployment file. deployment: what is deployed as
    that revision, in a word that changes with it; precisions: as the card's served_as. weights: what its cached pages
    were computed with, so that no others are taken for them. All empty where nobody said.
    """

    revision: str = ""
    deployment: str = ""
    precisions: str = ""
    weights: str = ""


UNSAID = Served()


class ReplicaLedger(PageLedger):
    """The promises at one replica. stopped: told of whoever gives back, so that the forecast forgets it as well.

    prompts: the prefill halves that compute the prompts of requests here; what is promised there ends with the hold
    here at the latest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, Replica] = {}
        self.stopped: Callable[[str], object] | None = None

    def release(self, request_id: str) -> bool:
        if self.stopped is not None:
            self.stopped(request_id)
        half = self.prompts.pop(request_id, None)
        if half is not None:
            half.ledger.release(request_id)
        return super().release(request_id)


class Replica:
    """One engine: its client, what is promised there, and its last report.

    prefills: of a decode half, those that may compute prompts for it, each with a ledger and reports of its own; none:
    it does both. bootstrap: of a prefill half, host and port where it hands pages over. rank: of an engine with several
    data-parallel ranks, each of which is a replica with a pool of its own. unit: what wakes and sleeps as one with it;
    left out: it alone, with its ranks.
    """

    def __init__(
        self,
        replica_id: str,
        client: EngineClient,
        *,
        prefills: "tuple[Replica, ...]" = (),
        bootstrap: tuple[str, int] | None = None,
        rank: int | None = None,
        region: str = DEFAULT_REGION,
        unit: str = "",
    ) -> None:
        self.id = replica_id
        self.unit = unit or replica_id.partition(".")[0]  # names of the file have no dots
        self.rank = rank
        self.region = region
        self.client = client
        self.prefills = prefills
        self.bootstrap = bootstrap
        self.ledger: ReplicaLedger = ReplicaLedger()
        self.info: ServerInfo | None = None
        self.snapshot: Snapshot | None = None
        self.figures: EngineFigures | None = None
        self.retractions = 0  # by those figures, since we look at them
        self.health = ReplicaHealth(HealthLimits())  # a fleet that takes it has limits of its own
        self.ghosts = Ghosts()
        self.ended = 0  # requests, for the watchdog: they are a sign of work
        self.heard_at = -math.inf  # when the last report was asked for that another process has told us
        self.poke = asyncio.Event()
        self.serving = True  # False while its unit sleeps, or is to sleep
        self.asleep = False  # nothing of it runs, and it is known that nothing does
        self.faults: list[str] = []  # in what it is not what the deployment promises; none of it is used then
        self.queue = EngineQueue()
        self.served = UNSAID
        self.reserved_tokens = 0  # what the engine reserves at most for each request's output
        self._promised: object = None
        self._check: Callable[[], Awaitable[list[str]]] | None = None

    def vet(self, promised: object, check: Callable[[], Awaitable[list[str]]]) -> None:
        """Ask `check` for contradictions before it serves, after each absence, and when other things are promised.

        check: raises the BackendError family if the engine can't be asked.
        """
        if promised != self._promised:
            self._promised, self._check = promised, check
            self.snapshot = None
            self.poke.set()

    async def look(self) -> ServerInfo:
        """Ask an engine that is not known what it is. Raises the BackendError family."""
        await self.client.ready()
        self.info = await self.client.server_info()
        faults = [] if self._check is None else await self._check()
        for fault in faults if faults != self.faults else ():
            log.error("an engine is not what the deployment says, and is not used", replica=self.id, fault=fault)
        self.faults = faults
        return self.info

    @property
    def engines(self) -> "tuple[Replica, ...]":
        """Itself, and the halves that compute prompts for it."""
        return (self, *self.prefills)

    def standing(self, now: float) -> Standing:
        """Its own; or if that is open, of its prefill halves the best one's."""
        own = self.health.verdict(now)
        if own is not Standing.OPEN or not self.prefills:
            return own
        halves = [half.health.verdict(now) for half in self.prefills]
        return next((good for good in (Standing.OPEN, Standing.TRIAL) if good in halves), halves[0])

    @property
    def known(self) -> bool:
        """Does it answer, and some half that it can get pages from?"""
        if not self.answers:
            return False
        return not self.prefills or any(half.answers and not self.disagreement(half) for half in self.prefills)

    @property
    def answers(self) -> bool:
        """Is its report known, and is it to serve?"""
        return self.snapshot is not None and self.info is not None and self.serving

    def open_to(self, regions: frozenset[str] | None) -> bool:
        """May prompts go there that are bound to these regions?"""
        return allows(regions, self.region)

    @property
    def free_pages(self) -> int:
        """The larger of ledger and report counts as taken, so that neither ghosts nor lag over-admit; 0 if unknown.

        What has been given back since the report counts as free, however long the engine repeats that report.
        """
        seen, held = self.snapshot, self.ledger.held_pages
        if seen is None:
            return 0
        unseen = self.ledger.taken_since(seen.taken_at)
        given_back = max(0, seen.held_pages - (held - unseen))
        return seen.total_pages - max(held, seen.used_pages - given_back + unseen)

    def disagreement(self, half: "Replica") -> str:
        """In what it contradicts one of its prefill halves; empty: in nothing, or they are not both known."""
        if self.info is None or half.info is None:
            return ""
        return pairs.disagreement(half.info, self.info)

    def takes_prompts(self, tokens: int, choices: int) -> bool:
        """Has this prefill half room for so many prompts of so many tokens, or at least for one at a time?"""
        seen = self.snapshot
        return (
            seen is not None
            and self.prompt_pages(tokens, choices) <= self.free_pages
            and len(self.ledger) < seen.running_max
        )

    def take(self, want: Want, now: float, half_id: str = "") -> None:
        """Hold its pages, and the prompt's at that prefill half; whoever releases it here releases both."""
        assert self.info is not None, "its page size is known before anything enters"
        page_tokens = self.info.page_tokens
        pages = pages_for(want.prompt_tokens + 1, page_tokens) * want.choices
        self.ledger.take(want.request_id, min(pages, self.info.total_tokens // page_tokens), now=now)
        if half_id:
            half = next(one for one in self.prefills if one.id == half_id)
            self.ledger.prompts[want.request_id] = half
            half.ledger.take(want.request_id, half.prompt_pages(want.prompt_tokens, want.choices), now=now)

    def prompt_pages(self, tokens: int, choices: int) -> int:
        """What so many prompts of so many tokens take there, at most its whole pool."""
        assert self.info is not None, "a known half has said its page size"
        most = self.info.total_tokens // self.info.page_tokens
        return min(pages_for(tokens, self.info.page_tokens) * choices, most)
