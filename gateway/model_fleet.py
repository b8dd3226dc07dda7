"""The replicas of one model behind its door: what their engines say, who takes new requests, what is inside.

The pipeline places requests here (`place`) and reports trouble (`suspect`); a run reports what it became (`ended`);
polling.py brings what engines say. Whether and where a request fits is the door's decision (door.py). A replica without
a report is unknown: neither idle nor full.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import structlog

from backends.engine_figures import EngineFigures
from backends.errors import BackendError
from backends.wire import Loads, ServerInfo
from gateway.admission import pages_for
from gateway.door import Door, Let
from gateway.gate import EngineReport, Gate
from gateway.ghosts import Finding
from gateway.health import ReplicaHealth, Standing
from gateway.limits import gate_limits, health_limits, placing_limits, queue_bounds
from gateway.opening import Opening
from gateway.placing import Placing
from gateway.regions import RegionMap
from gateway.replica import Replica, Snapshot
from gateway.rollouts.split import Split
from gateway.rollouts.tally import Tally
from gateway.settings import GatewaySettings
from gateway.site import Placed
from gateway.waiting_room import WaitingRoom
from gateway.want import Ended, Want

log = structlog.get_logger(__name__)

# SGLang's new_token_ratio at its start, before it is scaled; its load report says nothing of it.
_RESERVE_RATIO = 0.7


class ModelFleet:
    """The replicas of one model and the door before them."""

    def __init__(
        self,
        model: str,
        replicas: list[Replica],
        settings: GatewaySettings,
        *,
        shared: bool = False,
        regions: RegionMap | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.regions = regions or RegionMap()
        self.replicas: list[Replica] = []
        self._by_id: dict[str, Replica] = {}
        self._settings = settings
        self._clock = clock
        self.placing = Placing(placing_limits(settings), seed=time.monotonic_ns())
        if shared:
            self.placing.first_grant = 0.0  # nothing may be planned with before a board has granted it
        self.door = Door(self.placing, queue_bounds(settings), retry_after_s_max=settings.retry_after_seconds_max)
        self.room = WaitingRoom(self.door, clock=clock, give_back=self._give_back)
        self.admitted = 0
        self.admitted_elsewhere: dict[str, int] = {}  # by region
        # While a new revision is tried: who is served by which, and what is seen of both.
        self.split: Split | None = None
        self.tally: Tally | None = None
        # Requests that other processes have at each engine; None while nobody says, and no work is anybody's fault.
        self.running_elsewhere: Mapping[str, int] | None = None if shared else {}
        self._opening = Opening(self.placing, slow_start_s=settings.slow_start_seconds)
        self.serve(replicas)

    def serve(self, replicas: list[Replica]) -> None:
        """By these replicas from now on. Requests at others end there, and leave nothing behind."""
        self.replicas = replicas
        known = {engine for replica in self._by_id.values() for engine in replica.engines}
        for engine in self.engines():
            if engine not in known:
                engine.health = ReplicaHealth(health_limits(self._settings))
        prefills = {half.id: half for replica in replicas for half in replica.prefills}
        for half in known:
            if half.id in self.placing.halves and prefills.get(half.id) is not half:
                self.placing.part_half(half.id)
        for replica in replicas:
            self._by_id[replica.id] = replica
            replica.ledger.stopped = self.placing.stopped
        self._open_and_close()

    def engines(self) -> Iterator[Replica]:
        """All replicas, and the prefill halves of those that only decode; each once."""
        yield from dict.fromkeys(engine for replica in self.replicas for engine in replica.engines)

    def role(self, engine: Replica) -> Literal["unified", "prefill", "decode"]:
        if engine.prefills:
            return "decode"
        return "unified" if engine.id in self._by_id else "prefill"

    @property
    def up(self) -> bool:
        """Does any replica answer?"""
        return any(replica.known for replica in self.replicas)

    def serves_in(self, regions: frozenset[str] | None) -> bool:
        """Is any replica, whether or not it answers, where prompts may go that are bound to these regions?"""
        return regions is None or any(replica.open_to(regions) for replica in self.replicas)

    def up_in(self, regions: frozenset[str] | None) -> bool:
        """Does any replica answer there?"""
        return any(replica.known and replica.open_to(regions) for replica in self.replicas)

    def units_in(self, regions: frozenset[str] | None) -> frozenset[str] | None:
        """The names of the units there that may serve; None: all."""
        if regions is None:
            return None
        return frozenset(engine.unit for engine in self.engines() if engine.open_to(regions))

    def known(self) -> ServerInfo | None:
        """The last known facts of the smallest replica; kept while it is down, so that "never fits" stays decidable."""
        infos = [replica.info for replica in self.replicas if replica.info is not None]
        return min(infos, key=lambda info: info.total_tokens, default=None)

    def prompt_tokens_max(self) -> int | None:
        """The largest prompt that every prefill half can hold; None without any, or while they are unknown."""
        infos = [half.info for replica in self.replicas for half in replica.prefills if half.info is not None]
        return min((info.total_tokens for info in infos), default=None)

    def gate(self, replica: Replica) -> Gate | None:
        """The forecast of what is inside; None before the first report."""
        site = self.placing.sites.get(replica.id)
        return None if site is None else site.gate

    async def place(self, want: Want, *, wait_s: float, reject_if_busy: bool) -> tuple[Replica, Let]:
        """The replica where the request's pages are now held; its ledger says which half computes the prompt, if
        another does. Raises as WaitingRoom.place.
        """
        let = await self.room.place(want, wait_s=wait_s, reject_if_busy=reject_if_busy)
        self.admitted += 1
        region = let.placed.site.region
        if region != self.regions.home:
            self.admitted_elsewhere[region] = self.admitted_elsewhere.get(region, 0) + 1
        return self._by_id[let.placed.site.id], let

    def _give_back(self, placed: Placed) -> None:
        """Its request left before it was dispatched."""
        self._by_id[placed.site.id].ledger.release(placed.want.request_id)
        self.ended(placed.want, Ended(0, 0))

    def prompt_done(self, half: Replica, want: Want) -> None:
        """The prefill half has handed one choice's prompt over, or given it up: its pages there are free."""
        assert half.info is not None, "a half that took a prompt has said its page size"
        half.ledger.shrink(want.request_id, pages_for(want.prompt_tokens, half.info.page_tokens))
        if want.request_id not in half.ledger.holders():
            self.placing.prompt_done(want.request_id)
        half.poke.set()
        self.room.wake()

    def suspect(self, replica: Replica) -> None:
        """A connection failed: unknown until the next report, which is asked for at once."""
        replica.health.lost()
        self._unknown(replica)
        replica.poke.set()

    def stand(self, replica: Replica, *, serving: bool, asleep: bool) -> None:
        """serving: new requests may go there, once it answers. asleep: nothing of it runs, so that it is not asked.

        Said of a replica or prefill half, and of what is of the same unit.
        """
        if (replica.serving, replica.asleep) == (serving, asleep):
            return
        for engine in [one for one in replica.engines if one.unit == replica.unit]:
            engine.serving, engine.asleep = serving, asleep
            if asleep:
                engine.health.lost()
                engine.snapshot = None
            engine.poke.set()
        self._open_and_close()
        self.room.wake()

    def drain(self, replica_id: str, *, draining: bool) -> bool:
        """Send nothing new there, or again: to a replica, a prefill half, or all ranks of an engine. False if none is
        served.
        """
        named = [engine for engine in self.engines() if replica_id in (engine.id, engine.id.partition(".")[0])]
        for replica in named:
            replica.health.draining = draining
        self._open_and_close()
        self.room.wake()
        return bool(named)

    def progressed(self, want: Want, produced: int) -> None:
        """Each of its choices has produced about so many tokens. The end of a prefill makes room for the next."""
        if self.placing.progressed(want.request_id, produced, self._clock()):
            self.room.wake()

    def ended(self, want: Want, end: Ended) -> None:
        """A request that held pages has left its engine: lengths, speeds and its tenant's account learn from it."""
        self.door.ended(want.request_id, end)
        self.room.wake()

    def heard(self, engine: Replica, loads: Loads, epoch: str, asked_at: float) -> bool:
        """Another process was told so by the engine. Did we know less? Whether it answers us is for our own probes."""
        if engine.snapshot is None or engine.info is None or (engine.info.epoch or "") != epoch:
            return False
        if asked_at <= engine.snapshot.taken_at:
            return False
        engine.heard_at = asked_at
        self._take(engine, loads, asked_at)
        return True

    def reported(self, engine: Replica, loads: Loads, asked_at: float) -> bool:
        """An engine, perhaps a prefill half, has said how it is. False if it said no more than the last time."""
        if engine.snapshot is None:
            log.info("replica answers", replica=engine.id, total_tokens=loads.total_tokens)
        engine.health.probed(answered=True)
        return self._take(engine, loads, asked_at)

    def _take(self, engine: Replica, loads: Loads, asked_at: float) -> bool:
        now, gate = self._clock(), self.gate(engine)
        repeated = engine.snapshot is not None and engine.snapshot.is_repeated_by(loads)
        if not repeated:
            self._learn(engine, loads, asked_at, now)
        elif gate is not None:
            gate.catch_up(now)  # the report grows old, what is known of streams does not
        engine.health.moved(self._signs(engine, loads), now, busy=loads.running > 0 or len(engine.ledger) > 0)
        self._open_and_close()
        self.door.tick(now)
        self.room.wake()
        return not repeated

    def _learn(self, engine: Replica, loads: Loads, asked_at: float, now: float) -> None:
        """From a report that is new."""
        assert engine.info is not None, "its page size is asked for first"
        page_tokens = engine.info.page_tokens
        engine.snapshot = Snapshot(
            taken_at=asked_at,
            total_pages=loads.total_tokens // page_tokens,
            used_pages=pages_for(loads.used_tokens, page_tokens),
            running=loads.running,
            waiting=loads.waiting,
            running_max=loads.running_max,
            told_at=loads.told_at,
            held_pages=engine.ledger.held_pages - engine.ledger.taken_since(asked_at),
        )
        if engine in self.replicas:
            self._join(engine, loads, now)
        else:
            self._join_half(engine)
        gate = self.gate(engine)
        if gate is not None:
            engine.queue.reported(loads.unplaced, gate.unstarted(asked_at))

    def _signs(self, engine: Replica, loads: Loads) -> tuple[float, ...]:
        """Whatever changes when the engine works. What is only presumed of answers that come whole is no sign."""
        site = self.placing.sites.get(engine.id)
        running = () if site is None else site.gate.known_running()
        produced = sum(produced for need, _, produced in running if need.heard)
        return (loads.used_tokens, loads.running, loads.waiting, produced, engine.ended, loads.worked)

    def figured(self, engine: Replica, figures: EngineFigures | None) -> None:
        """What an engine's metrics say now, if anything. Pages that it took back since the last time are somebody's
        doing.
        """
        before, engine.figures = engine.figures, figures
        if before is None or figures is None or figures.retractions is None:
            return
        more = figures.retractions - (before.retractions or 0)  # SGLang says nothing before the first
        if more <= 0:
            return  # fewer: it has started anew
        engine.retractions += more
        blamed = self.placing.retracted(engine.id) if engine.id in self.placing.sites else ()
        log.warning("an engine took pages back", replica=engine.id, requests=more, doubted=sorted(blamed))

    def finished(
        self, replica: Replica, *, fault: bool, half: Replica | None = None, at_fault: Replica | None = None
    ) -> None:
        """A request has ended there, well or by the engine's fault. Wrong requests and departures say nothing.

        half: that computed its prompt, if another engine did. at_fault: the one of the two that failed; it alone is
        blamed.
        """
        now, changed = self._clock(), False
        for engine in (replica,) if half is None else (replica, half):
            before = engine.health.verdict(now)
            engine.ended += 1
            if not fault or engine is (at_fault or replica):
                engine.health.ended(fault=fault, now=now)
            after = engine.health.verdict(now)
            if after is not before:
                changed = True
                log.warning("a replica's standing has changed", replica=engine.id, was=before.value, now=after.value)
        if changed:
            self._open_and_close()

    def running(self) -> dict[str, int]:
        """How many requests we have at each engine, each choice as one."""
        counts = {engine.id: 0 for engine in self.engines()}
        for placed in self.placing.inside.values():
            half = None if placed.quote is None else placed.quote.half
            for name in (placed.site.id,) if half is None else (placed.site.id, half.id):
                counts[name] = counts.get(name, 0) + placed.want.choices
        return counts

    def haunted(self, engine: Replica, running: int) -> Finding:
        """Compare what runs in an engine with what is held there: ids to abort, and requests of nobody."""
        if self.running_elsewhere is None:
            return Finding()
        known = self.running().get(engine.id, 0) + self.running_elsewhere.get(engine.id, 0)
        was = engine.ghosts.unknown
        finding = engine.ghosts.reported(running=running, known=known, now=self._clock())
        if finding.unknown and not was:
            log.error("an engine works for nobody", replica=engine.id, requests=finding.unknown)
        return finding

    def _join(self, replica: Replica, loads: Loads, now: float) -> None:
        assert replica.info is not None, "its page size is asked for first"
        assert replica.snapshot is not None, "it has just reported"
        limits = gate_limits(self._settings, replica, running_max=loads.running_max)
        # Whole pages: what is left over holds nothing.
        total_tokens = replica.snapshot.total_pages * replica.info.page_tokens
        site = self.placing.join(replica.id, total_tokens, replica.info.page_tokens, limits)
        site.premises, site.revision = replica, replica.served.revision
        self.placing.locate(replica.id, replica.region, self.regions.round_trip_s(replica.region))
        ratio = _RESERVE_RATIO * replica.info.conservativeness
        report = EngineReport(loads.used_tokens, replica.snapshot.taken_at, ratio)
        self.placing.reported(replica.id, report, now)

    def _join_half(self, half: Replica) -> None:
        assert half.snapshot is not None, "it has just reported"
        assert half.info is not None, "its page size is asked for first"
        self.placing.join_half(
            half.id,
            half.snapshot.total_pages * half.info.page_tokens,
            tokens_ahead_max=self._settings.prefill_tokens_ahead_max,
            takes=half.takes_prompts,
        )

    def _open_and_close(self) -> None:
        """Look again who takes new requests; who is served no more and has nobody inside is gone."""
        now = self._clock()
        if self._opening.look(self.replicas, now):
            self.door.opened(now)
        for name in [site.id for site in self.placing.sites.values() if not site.open and not len(site.gate)]:
            if self._by_id[name] not in self.replicas:
                self.placing.part(name)
                self._opening.forget(name)
                del self._by_id[name]

    def silent(self, replica: Replica, error: BackendError) -> None:
        """It has not said how it is. The last report stands until so many of the last probes have failed."""
        replica.health.probed(answered=False)
        if replica.health.verdict(self._clock()) is Standing.DOWN:
            if replica.snapshot is not None:
                log.warning("replica does not answer", replica=replica.id, error=error.message)
                if replica.region != self.regions.home:
                    # The way there is cut, perhaps, and no answer will say so: what has not begun can go elsewhere.
                    replica.client.abandon_unanswered()
            self._unknown(replica)

    def restarted(self, replica: Replica) -> None:
        """Another epoch: the engine has forgotten everything, and so do we."""
        log.warning("replica has started anew: what was held there is void", replica=replica.id)
        self.placing.part(replica.id)
        self.placing.part_half(replica.id)
        replica.ledger.clear()

    def _unknown(self, replica: Replica) -> None:
        replica.snapshot = None
        self._open_and_close()
