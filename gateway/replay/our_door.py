"""Our policy under trial: the service's own door (door.py) in front of the simulated engine.

Translates what the simulation tells into the door's words and decides nothing. The oracle is the same door with every
output's true length in place of the learned distribution.
"""

from dataclasses import dataclass
from functools import partial

from gateway.door import Door, Let, Refusal
from gateway.fairness import QueueBounds
from gateway.forecast import peak_tokens
from gateway.gate import EngineReport, Gate, GateLimits, Need
from gateway.lengths import LengthDistribution, always
from gateway.placing import Ended, Placing, PlacingLimits, Want
from gateway.replay.doors import Promise
from gateway.replay.engine import Engine, Moment
from gateway.replay.requests import Fate, SimulatedRequest

_RETRY_AFTER_S_MAX = 60
_SITE = "engine-0"
_BOUNDS = QueueBounds(entries_max=4096, tokens_max=1 << 26, tenant_entries_max=2048, tenant_tokens_max=1 << 25)


@dataclass(frozen=True, slots=True)
class _Digest:
    """Stands for the digest of a prompt: a client that comes again sends the same."""

    of: str

    def __call__(self) -> bytes:
        return self.of.encode()


class OurDoor:
    """knows_lengths: the oracle."""

    def __init__(self, engine: Engine, promise: Promise, *, knows_lengths: bool = False) -> None:
        profile = engine.profile
        self._engine = engine
        self._promise = promise
        self._known: dict[str, SimulatedRequest] = {}  # waiting or inside
        self._let: list[SimulatedRequest] = []
        self._away: list[SimulatedRequest] = []
        self._ask_at = 0.0
        limits = PlacingLimits(coverage_every=1)
        self.placing = _KnowingPlacing(limits, self._known) if knows_lengths else Placing(limits)
        self.door = Door(self.placing, _BOUNDS, retry_after_s_max=_RETRY_AFTER_S_MAX)
        self._site = self.placing.join(
            _SITE,
            profile.total_tokens,
            profile.page_tokens,
            GateLimits(
                prefill_chunk_tokens=profile.chunk_tokens,
                running_max=profile.running_max,
                engine_clip_tokens=profile.clip_tokens,
            ),
        )

    @property
    def gate(self) -> Gate:
        return self._site.gate

    # What the simulation tells and asks

    def arrive(self, request: SimulatedRequest, now: float) -> None:
        self._known[request.id] = request
        left_s = self._promise.first_s - (now - request.arrived_at)
        answer = self.door.arrive(self._want(request, left_s), now, wait_s=left_s)
        if isinstance(answer, Let):
            self._let.append(request)
        elif isinstance(answer, Refusal):
            self._turn_away(request, Fate.REFUSED, answer)

    def send(self, now: float) -> list[SimulatedRequest]:
        if self._let:
            sent, self._let = self._let, []
            return sent
        while (answer := self.door.next(now)) is not None:
            request = self._known[answer.waiting.id]
            if isinstance(answer, Let):
                return [request]
            self._turn_away(request, Fate.EVICTED, answer.refusal)
        self._ask_at = now + self.door.ask_again_s
        return []

    def saw(self, moment: Moment, now: float) -> None:
        self.placing.observe_prefill(self._site, moment.prefilled_tokens, moment.attended, moment.seconds)
        if moment.steps:
            self.placing.observe_step(self._site, moment.seconds / moment.steps)
        for request in moment.first:
            self.placing.progressed(request.id, 1, now)
        for request in moment.finished:
            del self._known[request.id]
            self.door.ended(request.id, Ended(request.produced, request.prompt_tokens - request.cached_tokens))

    def poll(self, now: float) -> None:
        report = EngineReport(self._engine.pool.used_tokens, now, self._engine.new_token_ratio)
        self.placing.reported(_SITE, report, now)
        self.door.tick(now)

    def waiting(self) -> int:
        return len(self.door.queue)

    def ask_at(self) -> float:
        return self._ask_at

    def turned_away(self) -> list[SimulatedRequest]:
        away, self._away = self._away, []
        return away

    def _turn_away(self, request: SimulatedRequest, fate: Fate, refusal: Refusal) -> None:
        del self._known[request.id]
        request.fate, request.retry_after_s = fate, refusal.retry_after_s
        self._away.append(request)

    def _want(self, request: SimulatedRequest, first_s_max: float) -> Want:
        return Want(
            request.id,
            request.tenant,
            "chat",
            request.prompt_tokens,
            1,
            request.ceiling,
            blocks=request.blocks,
            first_s_max=first_s_max,
            between_s_max=self._promise.between_s,
            produced=partial(self._engine.produced, request),
            digest=_Digest(request.origin or request.id),
        )


class _KnowingPlacing(Placing):
    """Told every output's length, and that the engine caches what it has seen."""

    def __init__(self, limits: PlacingLimits, requests: dict[str, SimulatedRequest]) -> None:
        super().__init__(limits, make_gate=_KnowingGate)
        self._requests = requests

    def _lengths(self, want: Want) -> LengthDistribution:
        return always(self._requests[want.request_id].output_tokens)

    def _typical(self, want: Want) -> int:
        return self._requests[want.request_id].output_tokens


class _KnowingGate(Gate):
    """Its distributions are known lengths, so the peak is exact."""

    def peak_with(self, need: Need) -> float:
        known = [(resident, other.lengths.ceiling - produced) for other, resident, produced in self.known_running()]
        known.append((self.paged(need.private_tokens), need.lengths.ceiling))
        return peak_tokens(known)

    def _peak_fits(self, need: Need, planned: float) -> bool:
        return self.peak_with(need) <= planned
