"""How cost and quality of decisions grow with a fleet: replicas in regions, gateways whose reports are late.

Each gateway places requests at the replicas of its region by the service's own placing. It knows its own requests at
once, and everybody's by reports that come every 0.2 s and are `delay_s` old. A request holds its prompt and grows by a
token every 10 ms until it ends; sizes are a trace's, arrivals fill `load` of all pages. What a replica holds beyond its
pool is retracted, newest first. The gateways of a region share a board of claims (boards.py), or go by reports alone;
who finds no room by what is claimed waits a moment for more. Deterministic by its seed, but for the time that decisions
take.

The oracle is one gateway a region, without delay, that knows every output's length.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.gate import EngineReport, GateLimits
from gateway.placing import Placing, PlacingLimits
from gateway.replay.boards import SimulatedBoard
from gateway.replay.our_door import KnowingPlacing
from gateway.replay.profiles import FleetProfile, Profile
from gateway.replay.report import percentile
from gateway.replay.requests import SimulatedRequest
from gateway.replay.traces import TraceRow
from gateway.replay.truths import STEP_S, Running, Truth
from gateway.want import Ended, Want

REPORT_S = 0.2
# Requests from whose ends each gateway has learned lengths, as after a while of service.
_LEARNED = 100
# The fleet has filled after so many mean lives of a request.
_WARM_LIVES = 3.0
# Where claims are shared one that finds no room waits so long for its gateway's next ones.
_PATIENCE_S = 0.25


@dataclass(frozen=True, slots=True)
class FleetReport:
    """shared: by a board, or by reports alone. decision_us: CPU time of one try. over_full: of admissions, those after
    which a replica held more than its pool. retracted: of admitted requests. refused: of all. blind: of refusals, those
    although a replica of the region had room. good_of_oracle: requests that ended well, over the oracle's. waited_ms:
    for claims, of those admitted. used_mean, used_most: of pools, at the end. played: requests in all.
    """

    replicas: int
    regions: int
    gateways: int
    shared: bool
    decisions: int
    decision_us_p50: float
    decision_us_p99: float
    over_full: float
    retracted: float
    refused: float
    blind: float
    good_of_oracle: float
    waited_ms_p50: float
    waited_ms_p99: float
    used_mean: float
    used_most: float
    played: int


@dataclass(slots=True)
class _Counts:
    asked: int = 0
    admitted: int = 0
    over_full: int = 0
    retracted: int = 0
    refused: int = 0
    blind: int = 0
    times_us: list[float] = field(default_factory=list)
    waited_ms: list[float] = field(default_factory=list)


class _Played:
    """One fleet under one stream of requests."""

    def __init__(self, fleet: FleetProfile, profile: Profile, *, knows: bool, clock_ns: Callable[[], int]) -> None:
        self._fleet = fleet
        self._profile = profile
        self._clock_ns = clock_ns
        self._each = fleet.replicas // fleet.regions
        self._known: dict[str, SimulatedRequest] = {}
        self._knows = knows
        self.truths = [Truth() for _ in range(self._each * fleet.regions)]
        self.gateways = [self._gateway(number) for number in range(fleet.gateways)]
        self.counts = _Counts()
        self.now = 0.0
        self.played = 0
        self._ends: list[tuple[float, str, int]] = []
        self._history: list[tuple[float, list[int]]] = [(0.0, [0] * len(self.truths))]
        self._next_report = REPORT_S
        self._waiting: list[deque[tuple[SimulatedRequest, bool]]] = [deque() for _ in self.gateways]
        self._boards: list[SimulatedBoard] = []
        self._next_due = math.inf  # of all boards

    def share(self, trip_s: float) -> None:
        """By a board a region, from now on."""
        for region in range(self._fleet.regions):
            of = range(region, len(self.gateways), self._fleet.regions)
            board = SimulatedBoard(
                [self.gateways[number] for number in of],
                trip_s=trip_s,
                waiting=partial(self._somebody_waits, of),
                eased=partial(self._eased, of),
            )
            self._boards.append(board)
        self._next_due = min(board.next_at for board in self._boards)

    def learn(self, lengths: Sequence[int]) -> None:
        for placing in self.gateways:
            for number, length in enumerate(lengths):
                want = Want(f"before-{number}", "t", "chat", 10, 1, self._profile.output_tokens_max)
                self._known[want.request_id] = SimulatedRequest(want.request_id, "t", 0.0, 10, length, length)
                if placing.place(want, 0.0, charged_s=1.0) is not None:
                    placing.ended(want.request_id, Ended(length, 10, between_s=STEP_S))

    def ask(self, request: SimulatedRequest, gateway: int, *, counted: bool) -> None:
        """It comes to a gateway of its region, which lets it in somewhere or refuses it. counted: the fleet is full."""
        self.until(request.arrived_at)
        self._known[request.id] = request
        self.played += 1
        self.counts.asked += counted
        waiting = self._waiting[gateway]
        if waiting or not self._enters(request, gateway, counted=counted):
            waiting.append((request, counted))
            if self._boards:
                self._waits(gateway)
            else:
                self._refuse(gateway)

    @property
    def undecided(self) -> bool:
        """Does somebody still wait who counts?"""
        return self.counts.asked > self.counts.admitted + self.counts.refused

    def _enters(self, request: SimulatedRequest, gateway: int, *, counted: bool) -> bool:
        now, placing = self.now, self.gateways[gateway]
        want = Want(request.id, "t", "chat", request.prompt_tokens, 1, request.ceiling)
        began = self._clock_ns()
        placed = placing.place(want, now, charged_s=1.0)
        took_us = (self._clock_ns() - began) / 1000
        if counted:
            self.counts.times_us.append(took_us)
        if placed is None:
            return False
        placing.progressed(request.id, 1, now)
        index = int(placed.site.id)
        self.truths[index].enter(Running(request, gateway, counted, now))
        heapq.heappush(self._ends, (now + request.output_tokens * STEP_S, request.id, index))
        if counted:
            self.counts.admitted += 1
            self.counts.over_full += self.truths[index].used(now) > self._profile.total_tokens
            self.counts.waited_ms.append(1000 * (now - request.arrived_at))
        self._changed(gateway, placed.site.id)
        return True

    def _changed(self, gateway: int, site: str) -> None:
        if self._boards:
            regions = self._fleet.regions
            self._boards[gateway % regions].changed(gateway // regions, site)

    def _waits(self, gateway: int) -> None:
        regions = self._fleet.regions
        board = self._boards[gateway % regions]
        board.waits(gateway // regions, self.now)
        self._next_due = min(self._next_due, board.next_at)

    def _somebody_waits(self, of: range, number: int) -> bool:
        return bool(self._waiting[of[number]])

    def _eased(self, of: range, number: int) -> None:
        """A gateway of a region may plan with more."""
        self._try_again(of[number])

    def _try_again(self, gateway: int) -> None:
        """Who waits there may find room now."""
        waiting = self._waiting[gateway]
        while waiting:
            request, counted = waiting[0]
            if self.now - request.arrived_at > _PATIENCE_S:
                self._refuse(gateway)
            elif self._enters(request, gateway, counted=counted):
                waiting.popleft()
            else:
                self._waits(gateway)
                return

    def _refuse(self, gateway: int) -> None:
        """Whoever has waited longest there."""
        request, counted = self._waiting[gateway].popleft()
        del self._known[request.id]
        if not counted:
            return
        counts, now = self.counts, self.now
        counts.refused += 1
        room = 0.9 * self._profile.total_tokens - request.prompt_tokens - 2 * request.output_tokens
        counts.blind += any(self.truths[other].used(now) < room for other in self._region(gateway))

    def _region(self, gateway: int) -> range:
        region = gateway % self._fleet.regions
        return range(region * self._each, (region + 1) * self._each)

    def until(self, now: float) -> None:
        """All that happens by itself until then, in its order."""
        while True:
            ends_at = self._ends[0][0] if self._ends else math.inf
            at = min(ends_at, self._next_report, self._next_due)
            if at > now:
                break
            self.now = at
            if at == ends_at:
                self._end()
            elif at == self._next_report:
                self._next_report += REPORT_S
                self._retract(at)
                self._report(at)
            else:
                board = min(self._boards, key=lambda each: each.next_at)
                board.step()
                self._next_due = min(each.next_at for each in self._boards)
        self.now = now

    def _end(self) -> None:
        _, request_id, index = heapq.heappop(self._ends)
        running = self.truths[index].leave(request_id)
        if running is not None:
            self._ended(running, running.request.output_tokens, index)
            self._try_again(running.gateway)

    def _ended(self, running: Running, produced: int, index: int) -> None:
        request = running.request
        end = Ended(produced, request.prompt_tokens, between_s=STEP_S)
        self.gateways[running.gateway].ended(request.id, end)
        del self._known[request.id]
        self._changed(running.gateway, str(index))

    def _retract(self, now: float) -> None:
        for index, truth in enumerate(self.truths):
            while truth.used(now) > self._profile.total_tokens and len(truth.running) > 1:
                running = truth.leave(next(reversed(truth.running)))
                assert running is not None, "it ran"
                self.counts.retracted += running.counted
                self._ended(running, int((now - running.since) / STEP_S), index)

    def _report(self, now: float) -> None:
        self._history.append((now, [truth.used(now) for truth in self.truths]))
        while len(self._history) > 1 and self._history[1][0] <= now - self._fleet.delay_s:
            self._history.pop(0)
        asked_at, used = self._history[0]
        for number, placing in enumerate(self.gateways):
            for index in self._region(number):
                placing.reported(str(index), EngineReport(used[index], asked_at), now)
        for number in range(len(self.gateways)):
            self._try_again(number)

    def _gateway(self, number: int) -> Placing:
        limits = PlacingLimits(coverage_every=1 << 30)
        placing = KnowingPlacing(limits, self._known) if self._knows else Placing(limits, seed=number)
        profile = self._profile
        for index in self._region(number):
            gate = GateLimits(prefill_chunk_tokens=1 << 30, running_max=profile.running_max, engine_clip_tokens=0)
            placing.join(str(index), profile.total_tokens, profile.page_tokens, gate)
        return placing


def run_fleet(
    rows: Sequence[TraceRow], fleet: FleetProfile, profile: Profile, *, seed: int, clock_ns: Callable[[], int]
) -> FleetReport:
    """clock_ns: of CPU time, for the cost of decisions."""
    oracle = replace(fleet, gateways=fleet.regions, delay_s=0.0, claim_s=None)
    best = _play(rows, oracle, profile, seed=seed, knows=True, clock_ns=clock_ns)
    ours = _play(rows, fleet, profile, seed=seed, knows=False, clock_ns=clock_ns)
    counts = ours.counts
    pools = [truth.used(ours.now) / profile.total_tokens for truth in ours.truths]
    return FleetReport(
        replicas=len(ours.truths),
        regions=fleet.regions,
        gateways=fleet.gateways,
        shared=fleet.claim_s is not None,
        decisions=counts.asked,
        decision_us_p50=percentile(counts.times_us, 0.5),
        decision_us_p99=percentile(counts.times_us, 0.99),
        over_full=counts.over_full / max(1, counts.admitted),
        retracted=counts.retracted / max(1, counts.admitted),
        refused=counts.refused / max(1, counts.asked),
        blind=counts.blind / max(1, counts.refused),
        good_of_oracle=_good(ours.counts) / max(1, _good(best.counts)),
        waited_ms_p50=percentile(counts.waited_ms, 0.5),
        waited_ms_p99=percentile(counts.waited_ms, 0.99),
        used_mean=sum(pools) / len(pools),
        used_most=max(pools),
        played=ours.played + best.played,
    )


def _good(counts: _Counts) -> int:
    return counts.admitted - counts.retracted


def _play(
    rows: Sequence[TraceRow],
    fleet: FleetProfile,
    profile: Profile,
    *,
    seed: int,
    knows: bool,
    clock_ns: Callable[[], int],
) -> _Played:
    """The same requests at the same times for whoever decides; each comes to some gateway of some region."""
    draw, gateways = random.Random(seed), random.Random(seed + 1)  # noqa: S311 - reproducible, not secret
    rows = [row for row in rows if row.prompt_tokens + row.output_tokens < profile.total_tokens]
    played = _Played(fleet, profile, knows=knows, clock_ns=clock_ns)
    played.learn([_output(draw.choice(rows), profile) for _ in range(_LEARNED)])
    if fleet.claim_s is not None:
        played.share(fleet.claim_s)
    # A request holds its prompt and, on the mean of its life, half its output.
    held = [(row.prompt_tokens + _output(row, profile) / 2) * _output(row, profile) * STEP_S for row in rows]
    rate = fleet.load * len(played.truths) * profile.total_tokens * len(rows) / sum(held)
    warm_s = _WARM_LIVES * sum(_output(row, profile) for row in rows) / len(rows) * STEP_S
    now, number = 0.0, 0
    while number < fleet.decisions or played.undecided:
        now += draw.expovariate(rate)
        row, region = draw.choice(rows), draw.randrange(fleet.regions)
        counted = now >= warm_s and number < fleet.decisions
        request = SimulatedRequest(
            f"r{now}", "t", now, row.prompt_tokens, _output(row, profile), profile.output_tokens_max
        )
        gateway = region + fleet.regions * gateways.randrange(fleet.gateways // fleet.regions)
        played.ask(request, gateway, counted=counted)
        number += counted
    return played


def _output(row: TraceRow, profile: Profile) -> int:
    return max(1, min(row.output_tokens, profile.output_tokens_max))
