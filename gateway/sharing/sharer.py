"""Keeps a gateway process's part of what several share: claims, the heartbeat, fairness, reports, and burying the dead.

Each engine is asked by one elected process, which tells the others what it said; what they hear counts as their own
report would. Runs beside the fleet; requests never wait for it. What a gate may plan with is what the board last
granted. While the board is away for longer than a lease, others may plan with what was ours: then each process goes by
its share.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from backends.errors import BackendError
from backends.wire import Loads
from gateway.fleet import Fleet
from gateway.gate import Gate
from gateway.model_fleet import ModelFleet
from gateway.replica import Replica
from gateway.sharing.board import Beat, Board, BoardAway, Claim, Report
from gateway.sharing.claims import ask_of, take

log = structlog.get_logger(__name__)

BUSY_S = 0.05
IDLE_S = 0.25
BEAT_S_MAX = 0.5  # others' requests must be known sooner than ghosts are looked for
_HEAR_S = 1.0  # reports are heard when they are told; this often without being called


@dataclass(slots=True)
class _Model:
    board: Board
    heard_at: float
    beat_at: float = 0.0
    told: dict[str, str] = field(default_factory=dict)  # requests the board knows of, and where they run
    totals: dict[str, float] = field(default_factory=dict)  # of what accounts were served, as last heard
    polls: frozenset[str] = frozenset()  # engines that we ask for all
    hungry: frozenset[str] = frozenset()  # where somebody waits for what others have claimed
    said: dict[str, tuple[Loads, str, float]] = field(default_factory=dict)  # to be told: report, epoch, asked at
    trip_s: float = 0.0  # what the last telling took


class Sharer:
    """processes: how many share, for the time without a board. lease_s: of the board's leases."""

    def __init__(
        self,
        fleet: Fleet,
        board_of: Callable[[str], Board],
        *,
        process: str,
        processes: int,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._board_of = board_of
        self._process = process
        self._processes = processes
        self._lease_s = lease_s
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._wake = asyncio.Event()
        self._said = asyncio.Event()
        self._told = asyncio.Event()
        self.away = False
        self.reports_heard = 0
        fleet.polling.on_report = self._note_report

    def poke(self) -> None:
        """Somebody has given something back, or waits for a grant."""
        self._wake.set()

    def told(self) -> None:
        """Somebody has told what an engine said."""
        self._told.set()

    async def run(self) -> None:
        """For ever. The heartbeat has a task of its own: whoever is busy must not be taken for dead."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_for_ever(), name="heartbeat of shared pages")
            tasks.create_task(self._share_for_ever(), name="claims of shared pages")
            tasks.create_task(self._tell_for_ever(), name="reports to others")
            tasks.create_task(self._hear_for_ever(), name="reports of others")

    async def _beat_for_ever(self) -> None:
        while True:
            for fleet in self._fleet.all():
                known = self._models.get(fleet.model)
                if known is not None:
                    with suppress(BoardAway):  # the claims say so
                        await self._stay(fleet, known)
            await asyncio.sleep(min(self._lease_s / 6, BEAT_S_MAX))

    async def _stay(self, fleet: ModelFleet, model: _Model) -> Beat:
        """Renew the lease; learn which engines are ours to ask, and how much others have in each."""
        beat = await model.board.beat(self._process, fleet.running())
        model.polls, model.hungry = beat.polls, beat.hungry
        fleet.running_elsewhere = beat.others
        return beat

    def _note_report(self, fleet: ModelFleet, engine: Replica, loads: Loads, asked_at: float) -> None:
        model = self._models.get(fleet.model)
        if model is not None and engine.id in model.polls and engine.info is not None:
            model.said[engine.id] = loads, engine.info.epoch or "", asked_at
            self._said.set()

    async def _tell_for_ever(self) -> None:
        while True:
            await self._said.wait()
            self._said.clear()
            await self.tell()

    async def tell(self) -> None:
        """What engines have said since the last time; rather as too old than too new: the way there counts as age."""
        for model in tuple(self._models.values()):  # a deployment may bring one while a report is under way
            said, model.said = model.said, {}
            with suppress(BoardAway):  # the claims say so
                for engine, (loads, epoch, asked_at) in said.items():
                    began = self._clock()
                    await model.board.report(Report(engine, epoch, loads, began - asked_at + model.trip_s))
                    model.trip_s = self._clock() - began

    async def _hear_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEAR_S):
                    await self._told.wait()
            self._told.clear()
            for fleet in self._fleet.all():
                with suppress(BoardAway):  # as above
                    await self.hear(fleet)

    async def hear(self, fleet: ModelFleet) -> None:
        """Take what others were told by engines of one model, if it is newer than what we know."""
        model = self._models.get(fleet.model)
        if model is None:
            return
        engines = {engine.id: engine for engine in fleet.engines() if engine.id not in model.polls and engine.snapshot}
        if not engines:
            return
        asked_at = self._clock()
        for name, report in (await model.board.reports(tuple(engines))).items():
            if fleet.heard(engines[name], report.loads, report.epoch, asked_at - report.age_s):
                self.reports_heard += 1

    async def _share_for_ever(self) -> None:
        while True:
            self._wake.clear()
            for fleet in self._fleet.all():
                await self.share(fleet)
            hungry = any(len(fleet.room) > 0 for fleet in self._fleet.all())
            with suppress(TimeoutError):
                async with asyncio.timeout(BUSY_S if hungry else IDLE_S):
                    await self._wake.wait()

    async def close(self) -> None:
        """Leave well: what was ours is free at once."""
        for fleet in self._fleet.all():
            known = self._models.get(fleet.model)
            if known is not None:
                with suppress(BoardAway):
                    await known.board.leave(self._process, tuple(fleet.running()))

    async def share(self, fleet: ModelFleet) -> None:
        """One round for one model."""
        model = self._models.get(fleet.model)
        if model is None:
            model = self._models[fleet.model] = _Model(self._board_of(fleet.model), self._clock())
            fleet.room.waited = self.poke
        try:
            if self._clock() - model.beat_at >= self._lease_s / 3:
                await self._beat(fleet, model)
            for replica in fleet.replicas:
                gate = fleet.gate(replica)
                if gate is not None and replica.known:
                    await self._claim(fleet, model, replica, gate)
            model.heard_at = self._clock()
            self._say(away=False)
        except BoardAway as error:
            self._without(fleet, model, str(error))

    async def _claim(self, fleet: ModelFleet, model: _Model, replica: Replica, gate: Gate) -> None:
        assert replica.info is not None, "a known replica has said what it is"
        ask = ask_of(gate, processes=self._processes, others_hunger=replica.id in model.hungry)
        if ask is None:
            return
        head = fleet.door.queue.head() if ask.short else None
        hunger = None if head is None else fleet.door.queue.counter(head.tenant, head.tier)
        epoch = replica.info.epoch or ""
        claim = Claim(self._process, replica.id, epoch, gate.total_tokens, ask.least, ask.wanted, hunger)
        grant = await model.board.claim(claim)
        if grant.epoch != epoch:
            await self._agree(fleet, model, replica, grant.epoch)
            return
        gate.yields = grant.yields
        if take(gate, ask, grant.tokens, waits=head is not None):
            fleet.room.wake()

    async def _agree(self, fleet: ModelFleet, model: _Model, replica: Replica, board_epoch: str) -> None:
        """One of us has not seen that the engine has started anew: the engine knows."""
        before = replica.info
        with suppress(BackendError):
            info = await replica.look()
            if before is not None and info.epoch != before.epoch:
                fleet.restarted(replica)
            if (info.epoch or "") != board_epoch:
                await model.board.restarted(replica.id, board_epoch, info.epoch or "")

    async def _beat(self, fleet: ModelFleet, model: _Model) -> None:
        beat = await self._stay(fleet, model)
        model.beat_at = self._clock()
        await self._tell(fleet, model)
        await self._level(fleet, model)
        for dead in beat.dead:
            await self._bury(fleet, model, dead)

    async def _tell(self, fleet: ModelFleet, model: _Model) -> None:
        inside = {request_id: placed.site.id for request_id, placed in fleet.placing.inside.items()}
        came = {request_id: site for request_id, site in inside.items() if request_id not in model.told}
        gone = tuple(model.told.keys() - inside.keys())
        if came or gone:
            await model.board.note_requests(self._process, came, gone)
            model.told = inside

    async def _level(self, fleet: ModelFleet, model: _Model) -> None:
        """What others served an account counts here as well."""
        queue = fleet.door.queue
        charged = queue.take_charges()
        totals = await model.board.served(self._process, charged)
        for tenant, total in totals.items():
            before = model.totals.get(tenant)
            if before is not None:
                queue.add_outside(tenant, total - before - charged[tenant])
            model.totals[tenant] = total

    async def _bury(self, fleet: ModelFleet, model: _Model, dead: str) -> None:
        """Stop what a dead process has left, look at the engines again, and only then free its claims.

        Whoever asks any engine for all does it; two that do it at once do no harm.
        """
        if not model.polls:
            return
        if dead not in (await self._stay(fleet, model)).dead:
            return  # it was only late
        estate = await model.board.estate(dead)
        for replica in fleet.replicas:
            left = [rid for rid, where in estate.items() if where == replica.id]
            log.warning("a gateway has died", process=dead, replica=replica.id, requests=len(left))
            with suppress(BackendError):
                for rid in left:
                    await replica.client.abort(rid)
            await self._fleet.polling.poll(fleet, replica)
        await model.board.bury(dead, tuple(fleet.running()))

    def _without(self, fleet: ModelFleet, model: _Model, why: str) -> None:
        """Grants stand for a lease; then each goes by its share, and by what the engine says is in use."""
        self._say(away=True, why=why)
        fleet.running_elsewhere = None
        if self._clock() - model.heard_at < self._lease_s:
            return
        for replica in fleet.replicas:
            gate = fleet.gate(replica)
            if gate is not None:
                gate.yields = False
                gate.granted_tokens = max(gate.resident_tokens, gate.total_tokens // self._processes)
        fleet.room.wake()

    def _say(self, *, away: bool, why: str = "") -> None:
        if away and not self.away:
            log.warning("pages are planned by this process alone, at its share", error=why)
        elif self.away and not away:
            log.info("pages are shared again")
        self.away = away
