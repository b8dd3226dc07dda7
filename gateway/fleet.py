"""The replicas of each model and their last known state; asks each engine how it is, in a bounded task of its own.

The pipeline places requests here (`place`) and reports trouble (`suspect`); a run reports what it became (`ended`).
Whether a request fits is admission.py's and gate.py's decision; waiting is waiting_room.py's. A replica without a
report is unknown: neither idle nor full.
"""

import asyncio
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import structlog

from backends import pairs
from backends.client import EngineClient
from backends.errors import BackendError
from backends.wire import ServerInfo
from gateway.admission import Capacity, Verdict, pages_for, pages_needed, retry_after_s, verdict
from gateway.fairness import QueueBounds, ReplicaRates, Use, dominant_seconds
from gateway.forecast import EngineSpeed
from gateway.gate import Entry, Gate, GateLimits, Need
from gateway.hold import PageLedger
from gateway.lengths import LengthDistribution, LengthKey, OutputLengths, bucket_of, expected_about
from gateway.settings import GatewaySettings
from gateway.waiting_room import Ahead, Turn, WaitingRoom

log = structlog.get_logger(__name__)

# Before anything has finished there is no mean to go by; a guess that only feeds Retry-After.
_FIRST_DURATION_S = 2.0
# As unproven: they shape charges and hints until requests have shown better.
_FIRST_PREFILL_TOKENS_S = 10_000.0
_FIRST_STEP_S = 0.02
# What a replica can decode at once is counted in streams of this context.
_STREAM_TOKENS = 4096
# Pages alone decide here: the engine's batches, its reserve and the time between tokens are not limited by the gate.
_PAGES_ONLY = GateLimits(
    between_s_max=math.inf, prefill_chunk_tokens=1 << 40, running_max=1 << 30, engine_clip_tokens=0
)


@dataclass(frozen=True, slots=True)
class Want:
    """What a request asks of a replica: its exact prompt, and the most that each of its choices may produce."""

    request_id: str
    tenant: str
    endpoint: str
    prompt_tokens: int
    choices: int
    cap_tokens: int


@dataclass(frozen=True, slots=True)
class Ended:
    """What a request turned out to be. produced: by its longest choice; 0 if the engine never started it.

    uncached: prompt tokens that were prefilled. between_s: the mean time between its tokens; first_s: from dispatch to
    its first token; None where not seen.
    """

    produced: int
    uncached: int
    first_s: float | None
    between_s: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine's own report, with the moment it was asked for (monotonic seconds): holds taken later are not in it."""

    taken_at: float
    total_pages: int
    used_pages: int
    running: int
    waiting: int
    running_max: int


class ReplicaLedger(PageLedger):
    """The promises at one replica, and the forecast of what they will take: whoever gives back leaves both.

    prompts: of a pair, what is promised at its prefill half; its holds end with those here at the latest.
    """

    def __init__(self, prompts: PageLedger | None = None) -> None:
        super().__init__()
        self.gate: Gate | None = None
        self._prompts = prompts

    def release(self, request_id: str) -> bool:
        if self.gate is not None:
            self.gate.leave(request_id)
        if self._prompts is not None:
            self._prompts.release(request_id)
        return super().release(request_id)


class Replica:
    """One engine, or a pair: its client (of a pair, decode's), what is promised there, and its last report.

    prefill: a pair's other half, with a ledger and reports of its own. bootstrap: host and port where that half hands
    pages over.
    """

    def __init__(
        self,
        replica_id: str,
        client: EngineClient,
        *,
        prefill: "Replica | None" = None,
        bootstrap: tuple[str, int] | None = None,
    ) -> None:
        self.id = replica_id
        self.client = client
        self.prefill = prefill
        self.bootstrap = bootstrap
        self.ledger: ReplicaLedger = ReplicaLedger(prefill.ledger if prefill is not None else None)
        self.info: ServerInfo | None = None
        self.snapshot: Snapshot | None = None
        self.failures = 0
        self.poke = asyncio.Event()
        self.serving = True  # False before an engine that we start has been started
        self.faults: list[str] = []  # in what it is not what the deployment promises; none of it is used then
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
        """Itself, and a pair's other half."""
        return (self,) if self.prefill is None else (self, self.prefill)

    def capacity(self) -> Capacity | None:
        """What admission decides on; None while unknown. Of a pair, decode's: it holds its pages from the start, while
        those of prefill go back when they have been sent (`takes_prompt`).
        """
        seen = self.snapshot
        if seen is None or self.info is None or not self.serving:
            return None
        if self.prefill is not None and (self.prefill.snapshot is None or self.disagreement()):
            return None
        return Capacity(
            total_pages=seen.total_pages,
            used_pages=seen.used_pages,
            held_pages=self.ledger.held_pages,
            unseen_pages=self.ledger.taken_since(seen.taken_at),
            running=len(self.ledger),
            running_max=seen.running_max,
        )

    def disagreement(self) -> str:
        """In what the halves of a pair contradict each other; empty: in nothing, or they are not both known."""
        if self.prefill is None or self.info is None or self.prefill.info is None:
            return ""
        return pairs.disagreement(self.prefill.info, self.info)

    def takes_prompt(self, prompt_tokens: int, choices: int) -> bool:
        """Has the prefill half, if there is one, room for the prompts of all choices, or at least for one at a time?"""
        if self.prefill is None:
            return True
        capacity = self.prefill.capacity()
        return (
            capacity is not None and verdict(self._prompt_pages(prompt_tokens, choices), capacity) is Verdict.FITS_NOW
        )

    def take_prompt(self, request_id: str, prompt_tokens: int, choices: int, *, now: float) -> None:
        """Promise the prefill half's pages; whoever releases the request here releases them."""
        if self.prefill is not None:
            self.prefill.ledger.take(request_id, self._prompt_pages(prompt_tokens, choices), now=now)

    def _prompt_pages(self, prompt_tokens: int, choices: int) -> int:
        assert self.prefill is not None, "asked of a pair"
        assert self.prefill.info is not None, "a known half has said its page size"
        info = self.prefill.info
        return min(pages_for(prompt_tokens, info.page_tokens) * choices, info.total_tokens // info.page_tokens)


class ModelFleet:
    """The replicas of one model and the room where requests for it wait."""

    def __init__(
        self,
        model: str,
        replicas: list[Replica],
        settings: GatewaySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.replicas = replicas
        self._settings = settings
        self._clock = clock
        self._mean_duration_s = _FIRST_DURATION_S
        self.speed = EngineSpeed(prefill_tokens_s=_FIRST_PREFILL_TOKENS_S, step_s=_FIRST_STEP_S)
        self.lengths = OutputLengths()
        self._last_turn: tuple[Want, Turn] | None = None
        self._charged: dict[str, float] = {}  # dominant seconds of the requests that hold pages
        bounds = QueueBounds(
            entries_max=settings.queue_entries_max,
            tokens_max=settings.queue_tokens_max,
            tenant_entries_max=min(settings.queue_tenant_entries_max, settings.queue_entries_max),
            tenant_tokens_max=settings.queue_tokens_max // 2,
        )
        self.room: WaitingRoom[Want, Replica] = WaitingRoom(
            bounds=bounds,
            try_place=self._try_place,
            give_back=self.release,
            retry_after_s=self.retry_after_s,
        )

    def engines(self) -> Iterator[Replica]:
        """All replicas, each pair with its prefill half."""
        for replica in self.replicas:
            yield from replica.engines

    @property
    def up(self) -> bool:
        """Does any replica answer?"""
        return any(replica.capacity() is not None for replica in self.replicas)

    def known(self) -> ServerInfo | None:
        """The last known facts of the smallest replica; kept while it is down, so that "never fits" stays decidable."""
        infos = [replica.info for replica in self.replicas if replica.info is not None]
        return min(infos, key=lambda info: info.total_tokens, default=None)

    def prompt_tokens_max(self) -> int | None:
        """The largest prompt that every pair's prefill half can hold; None without pairs, or while they are unknown."""
        halves = [replica.prefill for replica in self.replicas if replica.prefill is not None]
        return min((half.info.total_tokens for half in halves if half.info is not None), default=None)

    def turn(self, want: Want) -> Turn:
        """How the request queues: behind its tenant's own, charged what it will probably take."""
        if self._last_turn is not None and self._last_turn[0] is want:
            return self._last_turn[1]  # asked for to queue it, and again to charge it
        typical = self.lengths.typical(self._key(want), ceiling=want.cap_tokens)
        cost_s = self._cost_s(want, uncached=want.prompt_tokens, produced=typical)
        turn = Turn(want.tenant, cost_s=cost_s, tokens=want.prompt_tokens)
        self._last_turn = (want, turn)
        return turn

    def _try_place(self, request_id: str, want: Want) -> Replica | None:
        """Take the pages at the replica with the most room that the forecast leaves free, or nothing."""
        now = self._clock()
        found = [(replica, capacity) for replica in self.replicas if (capacity := replica.capacity()) is not None]
        for replica, capacity in sorted(found, key=lambda pair: pair[1].free_pages, reverse=True):
            gate = self._gate(replica, capacity)
            need = self._need(want, gate)
            pages = pages_needed(
                prompt_tokens=want.prompt_tokens,
                cap_tokens=want.cap_tokens,
                choices=want.choices,
                outputs_ahead=1,
                page_tokens=gate.page_tokens,
                total_pages=capacity.total_pages,
            )
            if (
                verdict(pages, capacity) is Verdict.FITS_NOW
                and replica.takes_prompt(want.prompt_tokens, want.choices)
                and gate.entry(need, now) is Entry.NOW
            ):
                gate.enter(need)
                replica.ledger.take(request_id, pages, now=now)
                replica.take_prompt(request_id, want.prompt_tokens, want.choices, now=now)
                self._charged[request_id] = self.turn(want).cost_s
                return replica
        return None

    @staticmethod
    def _key(want: Want) -> LengthKey:
        return LengthKey("", want.tenant, want.endpoint, bucket_of(want.cap_tokens))

    def _lengths(self, want: Want) -> LengthDistribution:
        """Learned; before there is history, what is held ahead of a stream, and then as long again."""
        key = self._key(want)
        if self.lengths.has_history(key):
            return self.lengths.distribution(key, ceiling=want.cap_tokens)
        return expected_about(min(want.cap_tokens, self._settings.hold_outputs_ahead), ceiling=want.cap_tokens)

    def _need(self, want: Want, gate: Gate) -> Need:
        # Choices that could not all stand side by side run one after another: together they need the whole pool.
        prompt = min(want.prompt_tokens * want.choices, gate.total_tokens)
        return Need(want.request_id, prompt, 0, prompt, want.cap_tokens, self._lengths(want), want.choices)

    def _gate(self, replica: Replica, capacity: Capacity) -> Gate:
        """The replica's forecast; a new one if the engine has come back with another pool."""
        assert replica.info is not None, "a replica with a capacity has said its page size"
        total_tokens = capacity.total_pages * replica.info.page_tokens
        gate = replica.ledger.gate
        if gate is None or gate.total_tokens != total_tokens:
            gate = replica.ledger.gate = Gate(total_tokens, replica.info.page_tokens, _PAGES_ONLY, self.speed)
        return gate

    def _cost_s(self, want: Want, *, uncached: int, produced: int) -> float:
        known = self.known()
        total_tokens, page_tokens = (known.total_tokens, known.page_tokens) if known else (_STREAM_TOKENS, 1)
        resident = want.choices * (want.prompt_tokens + produced / 2)
        seconds = uncached * self.speed.prefill_token_s + produced * self.speed.step_s
        rates = ReplicaRates(
            prefill_tokens=1 / self.speed.prefill_token_s,
            decoded_tokens=max(1, total_tokens // _STREAM_TOKENS) / self.speed.step_s,
            pages=max(1, total_tokens // page_tokens),
        )
        return dominant_seconds(Use(uncached, produced * want.choices, resident / page_tokens * seconds), rates)

    def release(self, replica: Replica, request_id: str) -> None:
        """Give pages back and let those who wait try again. Idempotent."""
        if replica.ledger.release(request_id):
            replica.poke.set()  # the next report should show it: ask soon
            self.room.wake()

    def prompt_done(self, pair: Replica, want: Want) -> None:
        """The prefill half has handed one choice's prompt over, or given it up: its pages there are free."""
        half = pair.prefill
        assert half is not None, "said of a pair"
        assert half.info is not None, "a half that took a prompt has said its page size"
        half.ledger.shrink(want.request_id, pages_for(want.prompt_tokens, half.info.page_tokens))
        half.poke.set()
        self.room.wake()

    def suspect(self, replica: Replica) -> None:
        """A connection failed: unknown until the next report, which is asked for at once."""
        replica.snapshot = None
        replica.poke.set()

    def observe_duration(self, seconds: float) -> None:
        """A request ended after running this long; an exponential mean over about the last sixteen."""
        self._mean_duration_s += (seconds - self._mean_duration_s) / 16

    def progressed(self, replica: Replica, want: Want, produced: int) -> None:
        """Each of its choices has produced about so many tokens."""
        if replica.ledger.gate is not None:
            replica.ledger.gate.progressed(want.request_id, produced, self._clock())

    def ended(self, want: Want, end: Ended) -> None:
        """A request that held pages has left its engine: lengths, speeds and its tenant's account learn from it."""
        charged_s = self._charged.pop(want.request_id, None)
        if charged_s is None:
            return
        self.lengths.observe(self._key(want), end.produced)
        if end.between_s is not None:
            self.speed.observe_step(end.between_s)
        if end.first_s is not None:
            attended = end.uncached * (want.prompt_tokens - end.uncached / 2)
            self.speed.observe_prefill(end.uncached, attended, end.first_s)
        taken_s = self._cost_s(want, uncached=end.uncached, produced=end.produced) if end.produced else 0.0
        self.room.correct(Turn(want.tenant), taken_s - charged_s)

    def retry_after_s(self, want: Want, ahead: Ahead) -> int:
        """By the forecast's p90: of the work ahead, and of its pages' release; by running times until there is one."""
        # Drawn from the tenant: a replayed decision comes out the same.
        jitter = (zlib.crc32(want.tenant.encode()) & 0xFFFF) / 0x10000
        most_s = self._settings.retry_after_seconds_max
        waits = [self.room.forecast.starts_in(ahead.seconds).p90_s] if self.room.forecast.learned else []
        if self.lengths.has_history(self._key(want)):
            waits += self._room_in_s(want)
        if waits:
            return max(1, min(most_s, math.ceil(max(waits) * (1 + jitter / 4))))
        return retry_after_s(
            ahead=ahead.entries,
            running=sum(len(replica.ledger) for replica in self.replicas),
            mean_duration_s=self._mean_duration_s,
            jitter=jitter,
            most_s=most_s,
        )

    def _room_in_s(self, want: Want) -> list[float]:
        """Seconds until the first replica has its pages, if anybody foresees it."""
        now, foreseen = self._clock(), []
        for replica in self.replicas:
            capacity = replica.capacity()
            if capacity is not None:
                gate = self._gate(replica, capacity)
                seconds = gate.room_in_s(self._need(want, gate), now, probability=0.9)
                foreseen += [] if seconds is None else [seconds]
        return [min(foreseen)] if foreseen else []


class Fleet:
    """All models' replicas. `run` polls them until cancelled."""

    def __init__(self, models: list[ModelFleet], settings: GatewaySettings) -> None:
        self._models = {fleet.model: fleet for fleet in models}
        self._settings = settings
        self._changed = asyncio.Event()

    def replace(self, served: list[tuple[ModelFleet, list[Replica]]]) -> None:
        """Serve these models by these replicas from now on; requests that run elsewhere end there."""
        for fleet, replicas in served:
            fleet.replicas = replicas
        self._models = {fleet.model: fleet for fleet, _ in served}
        self._changed.set()
        for fleet, _ in served:
            fleet.room.wake()

    def of(self, model: str) -> ModelFleet:
        return self._models[model]

    def all(self) -> tuple[ModelFleet, ...]:
        return tuple(self._models.values())

    async def run(self) -> None:
        """Poll every engine, each in its own task, until cancelled; a deployment may bring and take some."""
        polls: dict[Replica, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                served = {engine: fleet for fleet in self._models.values() for engine in fleet.engines()}
                for gone in polls.keys() - served.keys():
                    polls.pop(gone).cancel()
                for engine in served.keys() - polls.keys():
                    polls[engine] = tasks.create_task(
                        self._poll_for_ever(served[engine], engine), name=f"poll {engine.id}"
                    )
                await self._changed.wait()

    async def _poll_for_ever(self, fleet: ModelFleet, replica: Replica) -> None:
        while True:
            replica.poke.clear()
            await self.poll(fleet, replica)
            busy = len(replica.ledger) > 0 or len(fleet.room) > 0 or replica.snapshot is None
            interval = self._settings.poll_interval_busy_s if busy else self._settings.poll_interval_idle_s
            await asyncio.sleep(self._settings.poll_interval_busy_s / 4)  # pokes come in bursts: one poll serves many
            try:
                async with asyncio.timeout(interval):
                    await replica.poke.wait()
            except TimeoutError:
                pass

    async def poll(self, fleet: ModelFleet, replica: Replica) -> None:
        """Ask once. A failure keeps the last report until `poll_failures_max` in a row; then the replica is unknown."""
        asked_at = time.monotonic()
        try:
            info = replica.info
            if info is None or replica.snapshot is None:
                info = await replica.look()
            if replica.faults:
                return
            loads = await replica.client.loads()
        except BackendError as error:
            replica.failures += 1
            if replica.failures == self._settings.poll_failures_max:
                log.warning("replica does not answer", replica=replica.id, error=error.message)
            if replica.failures >= self._settings.poll_failures_max:
                replica.snapshot = None
            return
        if replica.snapshot is None:
            log.info("replica answers", replica=replica.id, total_tokens=loads.total_tokens)
            for pair in fleet.replicas:
                if replica in pair.engines and (why := pair.disagreement()):
                    log.error("the halves of a pair can't share pages: it is not used", pair=pair.id, why=why)
        replica.failures = 0
        page_tokens = info.page_tokens
        replica.snapshot = Snapshot(
            taken_at=asked_at,
            total_pages=loads.total_tokens // page_tokens,
            used_pages=pages_for(loads.used_tokens, page_tokens),
            running=loads.running,
            waiting=loads.waiting,
            running_max=loads.running_max,
        )
        gate = replica.ledger.gate
        if gate is not None:
            unseen = replica.ledger.taken_since(asked_at) * page_tokens
            # The ratio matters to the engine's reserve alone, which this gate doesn't model.
            gate.reported(loads.used_tokens, 0.0, asked_at, unseen_tokens=unseen)
        fleet.room.wake()
