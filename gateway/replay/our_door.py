"""Our policy under trial: the service's own decisions (gate.py, fairness.py, lengths.py) in front of the engine.

The oracle is the same door with every output's true length in place of the learned distribution.
"""

import math
from dataclasses import dataclass, field

from gateway.fairness import Entry as Turn
from gateway.fairness import FairQueue, QueueBounds, ReplicaRates, Use, dominant_seconds
from gateway.forecast import EngineSpeed, peak_tokens
from gateway.gate import Entry, Gate, GateLimits, Need
from gateway.lengths import LengthDistribution, LengthKey, OutputLengths, always, bucket_of
from gateway.replay.doors import Promise
from gateway.replay.engine import Engine, Moment
from gateway.replay.prefixes import Prefixes
from gateway.replay.requests import Fate, SimulatedRequest
from gateway.waiting_forecast import WaitForecast

# Guesses before anything was measured; they only shape the first seconds.
_FIRST_PREFILL_TOKENS_S = 20_000.0
_FIRST_STEP_S = 0.01
# What a replica can decode at once is counted in streams of this context.
_STREAM_TOKENS = 4096
_RETRY_AFTER_S_MAX = 60.0
_MODEL = "model"
_TIER = 0


@dataclass(slots=True)
class Coverage:
    """How often the truth stayed below the forecast's 1 - ε quantile, over the decisions that let a request in."""

    decisions: int = 0
    covered: int = 0

    @property
    def share(self) -> float:
        return self.covered / self.decisions if self.decisions else 1.0


@dataclass(slots=True)
class _Waiting:
    request: SimulatedRequest
    lengths: LengthDistribution
    ahead_s: float
    prefill_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class _Inside:
    request: SimulatedRequest
    charged_s: float


@dataclass(slots=True)
class _Hint:
    """A refused request and when it was told to come again."""

    at: float
    request: SimulatedRequest


@dataclass(slots=True)
class Honesty:
    """Would those who were refused have been let in at the time they were told? Asked then, without entering."""

    asked: int = 0
    admitted: int = 0
    hints: list[_Hint] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.admitted / self.asked if self.asked else 1.0


class OurDoor:
    """knows_lengths: the oracle."""

    def __init__(self, engine: Engine, promise: Promise, *, knows_lengths: bool = False) -> None:
        profile = engine.profile
        self._engine = engine
        self._promise = promise
        self._knows_lengths = knows_lengths
        limits = GateLimits(
            between_s_max=promise.between_s,
            prefill_chunk_tokens=profile.chunk_tokens,
            running_max=profile.running_max,
            engine_clip_tokens=profile.clip_tokens,
        )
        speed = EngineSpeed(prefill_tokens_s=_FIRST_PREFILL_TOKENS_S, step_s=_FIRST_STEP_S)
        make = _KnowingGate if knows_lengths else Gate
        self.gate = make(profile.total_tokens, profile.page_tokens, limits, speed)
        bounds = QueueBounds(entries_max=4096, tokens_max=1 << 26, tenant_entries_max=2048, tenant_tokens_max=1 << 25)
        self.queue: FairQueue[_Waiting] = FairQueue(bounds)
        self.lengths = OutputLengths()
        self.waits = WaitForecast()
        self.coverage = Coverage()
        self.honesty = Honesty()
        self._prefixes = Prefixes(profile.total_tokens)
        self._inside: dict[str, _Inside] = {}
        self._ask_at = math.inf
        self._streams = max(1, min(profile.running_max, profile.total_tokens // _STREAM_TOKENS))

    # What the simulation tells and asks

    def arrive(self, request: SimulatedRequest, now: float) -> None:
        waiting = self._forecast(request)
        late_s = self._late_s(waiting)
        if late_s > 0 or not self.queue.has_room(request.tenant, _TIER, request.prompt_tokens):
            request.fate = Fate.REFUSED
            request.retry_after_s = self.waits.retry_after_s(late_s, jitter=0.0, most_s=_RETRY_AFTER_S_MAX)
            self.honesty.hints.append(_Hint(now + request.retry_after_s, request))
            return
        self.queue.push(Turn(request.id, request.tenant, _TIER, waiting.cost_s, request.prompt_tokens, waiting))

    def send(self, now: float) -> list[SimulatedRequest]:
        fresh = False
        while (turn := self.queue.head()) is not None:
            waiting = turn.item
            request = waiting.request
            if now + waiting.prefill_s > request.arrived_at + self._promise.first_s:
                self.queue.remove(turn.id)  # its first token would come too late
                request.fate = Fate.EVICTED
                continue
            if not fresh:
                self._note_progress(now)
                fresh = True
            need = self._need(waiting)
            entry = self.gate.entry(need, now)
            if entry is not Entry.NOW:
                # In service every token that passes asks again; here the time is worked out.
                self._ask_at = now + self.gate.between_clears_s(need, now) if entry is Entry.BETWEEN else math.inf
                return []
            self._measure_coverage(request, need)
            self.queue.serve(turn)
            self.waits.observe(waiting.ahead_s, now - request.arrived_at)
            self.gate.enter(need)
            self._prefixes.entered(request.id, request.blocks)
            self._inside[request.id] = _Inside(request, turn.cost_s)
            return [request]
        return []

    def saw(self, moment: Moment, now: float) -> None:
        speed = self.gate.speed
        speed.observe_prefill(moment.prefilled_tokens, moment.attended, moment.seconds)
        if moment.steps:
            speed.observe_step(moment.seconds / moment.steps)
        for request in moment.first:
            self.gate.progressed(request.id, 1, now)
        for request in moment.finished:
            self._left(request)

    def poll(self, now: float) -> None:
        self._note_progress(now)
        self.gate.reported(self._engine.pool.used_tokens, self._engine.new_token_ratio, now)
        due = [hint for hint in self.honesty.hints if hint.at <= now]
        self.honesty.hints = [hint for hint in self.honesty.hints if hint.at > now]
        for hint in due:
            self.honesty.asked += 1
            admitted = self._late_s(self._forecast(hint.request)) <= 0
            self.honesty.admitted += admitted
            self.waits.observe_retry(admitted=admitted)

    def waiting(self) -> int:
        return len(self.queue)

    def ask_at(self) -> float:
        return self._ask_at

    # Decisions

    def _lengths(self, request: SimulatedRequest) -> LengthDistribution:
        if self._knows_lengths:
            return always(request.output_tokens)
        return self.lengths.distribution(self._key(request), ceiling=request.ceiling)

    @staticmethod
    def _key(request: SimulatedRequest) -> LengthKey:
        return LengthKey(_MODEL, request.tenant, "chat", bucket_of(request.ceiling))

    def _need(self, waiting: _Waiting) -> Need:
        request = waiting.request
        known = self._prefixes.known(request.blocks, request.prompt_tokens)
        return Need(
            request.id,
            prompt_tokens=request.prompt_tokens,
            shared_tokens=known.shared_tokens,
            uncached_tokens=request.prompt_tokens - known.cached_tokens,
            ceiling=request.ceiling,
            lengths=waiting.lengths,
        )

    def _forecast(self, request: SimulatedRequest) -> _Waiting:
        known = self._prefixes.known(request.blocks, request.prompt_tokens)
        uncached = request.prompt_tokens - known.cached_tokens
        lengths = self._lengths(request)
        expected = request.output_tokens
        if not self._knows_lengths:
            expected = self.lengths.typical(self._key(request), ceiling=request.ceiling)
        cost_s = self._cost_s(uncached, request.prompt_tokens, expected)
        ahead_s = self.queue.ahead_s(request.tenant, _TIER)
        attended = uncached * (request.prompt_tokens - uncached / 2)
        prefill_s = self.gate.speed.prefill_s(uncached, attended) + self.gate.speed.step_s
        return _Waiting(request, lengths, ahead_s, prefill_s, cost_s)

    def _cost_s(self, uncached: int, prompt: int, produced: int) -> float:
        speed, page = self.gate.speed, self._engine.profile.page_tokens
        pages = -(-(prompt + produced / 2) // page)
        seconds = uncached * speed.prefill_token_s + produced * speed.step_s
        rates = ReplicaRates(
            prefill_tokens=1 / speed.prefill_token_s,
            decoded_tokens=self._streams / speed.step_s,
            pages=self._engine.profile.total_tokens / page,
        )
        return dominant_seconds(Use(uncached, produced, pages * seconds), rates)

    def _late_s(self, waiting: _Waiting) -> float:
        """How much too late its first token would come if it arrived now, by the median of the forecast."""
        starts = self.waits.starts_in(waiting.ahead_s).p50_s
        return starts + self.gate.prefilling_s() + waiting.prefill_s - self._promise.first_s

    # Bookkeeping

    def _note_progress(self, now: float) -> None:
        for inside in self._inside.values():
            request = inside.request
            if request.first_at is not None:
                self.gate.progressed(request.id, self._engine.produced(request), now)

    def _left(self, request: SimulatedRequest) -> None:
        inside = self._inside.pop(request.id)
        self.gate.leave(request.id)
        for heir, tokens in self._prefixes.left(request.id, request.blocks).items():
            self.gate.inherit(heir, tokens)
        self.lengths.observe(self._key(request), request.produced)
        taken_s = self._cost_s(request.prompt_tokens - request.cached_tokens, request.prompt_tokens, request.produced)
        self.queue.correct(request.tenant, _TIER, taken_s - inside.charged_s)

    def _measure_coverage(self, request: SimulatedRequest, need: Need) -> None:
        """Compare with the true peak if nobody else came: what the quantile is of."""
        truth = [
            (resident, self._inside[other.id].request.output_tokens - produced)
            for other, resident, produced in self.gate.known_running()
        ]
        truth.append((self.gate.paged(need.prompt_tokens - need.shared_tokens), request.output_tokens))
        self.coverage.decisions += 1
        self.coverage.covered += peak_tokens(truth) <= self.gate.peak_with(need)


class _KnowingGate(Gate):
    """Its distributions are known lengths, so the peak is exact."""

    def peak_with(self, need: Need) -> float:
        known = [(resident, other.lengths.ceiling - produced) for other, resident, produced in self.known_running()]
        known.append((self.paged(need.prompt_tokens - need.shared_tokens), need.lengths.ceiling))
        return peak_tokens(known)
