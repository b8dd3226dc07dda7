"""How cost and quality of decisions grow with a fleet: replicas in regions, gateways whose reports are late.

Each gateway places requests at the replicas of its region by the service's own placing. It knows its own requests at
once, and everybody's by reports that come every 0.2 s and are `delay_s` old. A request holds its prompt and grows by a
token every 10 ms until it ends; sizes are a trace's, arrivals fill `load` of all pages. What a replica holds beyond its
pool is retracted, newest first. There is no board of claims: this is what reports alone do. Deterministic by its seed,
but for the time that decisions take.

The oracle is one gateway a region, without delay, that knows every output's length.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gateway.gate import EngineReport, GateLimits
from gateway.placing import Ended, Placing, PlacingLimits, Want
from gateway.replay.our_door import KnowingPlacing
from gateway.replay.profiles import FleetProfile, Profile
from gateway.replay.report import percentile
from gateway.replay.requests import SimulatedRequest
from gateway.replay.traces import TraceRow

STEP_S = 0.01
REPORT_S = 0.2
# Requests from whose ends each gateway has learned lengths, as after a while of service.
_LEARNED = 100
# The fleet has filled after so many mean lives of a request.
_WARM_LIVES = 3.0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """over_full: of admissions, those after which a replica held more than its pool. retracted: of admitted requests.
    refused: of all. blind: of refusals, those although a replica of the region had room. good_of_oracle: requests that
    ended well, over the oracle's. used_mean, used_most: of pools, at the end. decision_us: CPU time of one.
    """

    replicas: int
    regions: int
    gateways: int
    decisions: int
    decision_us_p50: float
    decision_us_p99: float
    over_full: float
    retracted: float
    refused: float
    blind: float
    good_of_oracle: float
    used_mean: float
    used_most: float


@dataclass(slots=True)
class _Counts:
    asked: int = 0
    admitted: int = 0
    over_full: int = 0
    retracted: int = 0
    refused: int = 0
    blind: int = 0
    times_us: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    request: SimulatedRequest
    gateway: int
    counted: bool


@dataclass(slots=True)
class _Truth:
    """One replica as it is. Every running request has its prompt, and a token more with every step."""

    running: dict[str, _Running] = field(default_factory=dict)
    prompts: int = 0
    started_sum: float = 0.0  # of the running requests' start times

    def used(self, now: float) -> int:
        return self.prompts + int((len(self.running) * now - self.started_sum) / STEP_S)

    def enter(self, request: SimulatedRequest, gateway: int, *, counted: bool) -> None:
        self.running[request.id] = _Running(request, gateway, counted)
        self.prompts += request.prompt_tokens
        self.started_sum += request.arrived_at

    def leave(self, request_id: str) -> _Running | None:
        """None: it was retracted."""
        running = self.running.pop(request_id, None)
        if running is not None:
            self.prompts -= running.request.prompt_tokens
            self.started_sum -= running.request.arrived_at
        return running


class _Played:
    """One fleet under one stream of requests."""

    def __init__(self, fleet: FleetProfile, profile: Profile, *, knows: bool, clock_ns: Callable[[], int]) -> None:
        self._fleet = fleet
        self._profile = profile
        self._clock_ns = clock_ns
        self._each = fleet.replicas // fleet.regions
        self._known: dict[str, SimulatedRequest] = {}
        self._knows = knows
        self.truths = [_Truth() for _ in range(self._each * fleet.regions)]
        self.gateways = [self._gateway(number) for number in range(fleet.gateways)]
        self.counts = _Counts()
        self.now = 0.0
        self._ends: list[tuple[float, str, int]] = []
        self._history: list[tuple[float, list[int]]] = [(0.0, [0] * len(self.truths))]
        self._next_report = REPORT_S

    def learn(self, lengths: Sequence[int]) -> None:
        for placing in self.gateways:
            for number, length in enumerate(lengths):
                want = Want(f"before-{number}", "t", "chat", 10, 1, self._profile.output_tokens_max)
                self._known[want.request_id] = SimulatedRequest(want.request_id, "t", 0.0, 10, length, length)
                if placing.place(want, 0.0, charged_s=1.0) is not None:
                    placing.ended(want.request_id, Ended(length, 10, between_s=STEP_S))

    def ask(self, request: SimulatedRequest, gateway: int, *, counted: bool) -> None:
        """It comes to a gateway of its region, which lets it in somewhere or refuses it. counted: the fleet is full."""
        now, placing = request.arrived_at, self.gateways[gateway]
        self._until(now)
        self.now = now
        self._known[request.id] = request
        want = Want(request.id, "t", "chat", request.prompt_tokens, 1, request.ceiling)
        began = self._clock_ns()
        placed = placing.place(want, now, charged_s=1.0)
        took_us = (self._clock_ns() - began) / 1000
        if placed is None:
            del self._known[request.id]
        else:
            placing.progressed(request.id, 1, now)
            index = int(placed.site.id)
            self.truths[index].enter(request, gateway, counted=counted)
            heapq.heappush(self._ends, (now + request.output_tokens * STEP_S, request.id, index))
        if counted:
            self._count(request, gateway, None if placed is None else int(placed.site.id), took_us)

    def _count(self, request: SimulatedRequest, gateway: int, index: int | None, took_us: float) -> None:
        counts, now = self.counts, request.arrived_at
        counts.asked += 1
        counts.times_us.append(took_us)
        if index is not None:
            counts.admitted += 1
            counts.over_full += self.truths[index].used(now) > self._profile.total_tokens
            return
        counts.refused += 1
        room = 0.9 * self._profile.total_tokens - request.prompt_tokens - 2 * request.output_tokens
        counts.blind += any(self.truths[other].used(now) < room for other in self._region(gateway))

    def _region(self, gateway: int) -> range:
        region = gateway % self._fleet.regions
        return range(region * self._each, (region + 1) * self._each)

    def _until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, request_id, index = heapq.heappop(self._ends)
            running = self.truths[index].leave(request_id)
            if running is not None:
                self._ended(running, running.request.output_tokens)
        if now >= self._next_report:
            self._next_report += REPORT_S
            self._retract(now)
            self._report(now)

    def _ended(self, running: _Running, produced: int) -> None:
        request = running.request
        end = Ended(produced, request.prompt_tokens, between_s=STEP_S)
        self.gateways[running.gateway].ended(request.id, end)
        del self._known[request.id]

    def _retract(self, now: float) -> None:
        for truth in self.truths:
            while truth.used(now) > self._profile.total_tokens and len(truth.running) > 1:
                running = truth.leave(next(reversed(truth.running)))
                assert running is not None, "it ran"
                self.counts.retracted += running.counted
                self._ended(running, int((now - running.request.arrived_at) / STEP_S))

    def _report(self, now: float) -> None:
        self._history.append((now, [truth.used(now) for truth in self.truths]))
        while len(self._history) > 1 and self._history[1][0] <= now - self._fleet.delay_s:
            self._history.pop(0)
        asked_at, used = self._history[0]
        for number, placing in enumerate(self.gateways):
            for index in self._region(number):
                placing.reported(str(index), EngineReport(used[index], asked_at), now)

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
    oracle = replace(fleet, gateways=fleet.regions, delay_s=0.0)
    best = _play(rows, oracle, profile, seed=seed, knows=True, clock_ns=clock_ns)
    ours = _play(rows, fleet, profile, seed=seed, knows=False, clock_ns=clock_ns)
    counts = ours.counts
    pools = [truth.used(ours.now) / profile.total_tokens for truth in ours.truths]
    return FleetReport(
        replicas=len(ours.truths),
        regions=fleet.regions,
        gateways=fleet.gateways,
        decisions=counts.asked,
        decision_us_p50=percentile(counts.times_us, 0.5),
        decision_us_p99=percentile(counts.times_us, 0.99),
        over_full=counts.over_full / max(1, counts.admitted),
        retracted=counts.retracted / max(1, counts.admitted),
        refused=counts.refused / max(1, counts.asked),
        blind=counts.blind / max(1, counts.refused),
        good_of_oracle=_good(ours.counts) / max(1, _good(best.counts)),
        used_mean=sum(pools) / len(pools),
        used_most=max(pools),
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
    # A request holds its prompt and, on the mean of its life, half its output.
    held = [(row.prompt_tokens + _output(row, profile) / 2) * _output(row, profile) * STEP_S for row in rows]
    rate = fleet.load * len(played.truths) * profile.total_tokens * len(rows) / sum(held)
    warm_s = _WARM_LIVES * sum(_output(row, profile) for row in rows) / len(rows) * STEP_S
    now, number = 0.0, 0
    while number < fleet.decisions:
        now += draw.expovariate(rate)
        row, region = draw.choice(rows), draw.randrange(fleet.regions)
        counted = now >= warm_s
        request = SimulatedRequest(
            f"r{now}", "t", now, row.prompt_tokens, _output(row, profile), profile.output_tokens_max
        )
        gateway = region + fleet.regions * gateways.randrange(fleet.gateways // fleet.regions)
        played.ask(request, gateway, counted=counted)
        number += counted
    return played


def _output(row: TraceRow, profile: Profile) -> int:
    return max(1, min(row.output_tokens, profile.output_tokens_max))
