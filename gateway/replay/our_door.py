"""Our policy under trial: the service's own door (door.py) in front of the simulated engine.

Translates what the simulation tells into the door's words and decides nothing. The oracle is the same door with every
output's true length in place of the learned distribution.
"""

from dataclasses import dataclass
from functools import partial

from gateway.door import Door, Let, Refusal
from gateway.experience import Experience
from gateway.fairness import QueueBounds
from gateway.forecast import peak_tokens
from gateway.gate import EngineReport, Gate, GateLimits
from gateway.lengths import LengthDistribution, always
from gateway.need import Need
from gateway.placing import Placing, PlacingLimits
from gateway.replay.doors import Promise
from gateway.replay.engine import Engine, Moment
from gateway.replay.requests import Fate, SimulatedRequest
from gateway.want import Ended, Want

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
    """Before one engine, and before more that `join` later. knows_lengths: the oracle."""

    def __init__(
        self, engine: Engine, promise: Promise, *, knows_lengths: bool = False, trust_regrowth_s: float = 300.0
    ) -> None:
        self._engines: dict[str, Engine] = {}
        self._promise = promise
        self._retractions: dict[str, int] = {}
        self._known: dict[str, SimulatedRequest] = {}  # waiting or inside
        self._let: list[SimulatedRequest] = []
        self._away: list[SimulatedRequest] = []
        self._ask_at = 0.0
        limits = PlacingLimits(coverage_every=1, trust_regrowth_s=trust_regrowth_s)
        self.placing = KnowingPlacing(limits, self._known) if knows_lengths else Placing(limits)
        self.door = Door(self.placing, _BOUNDS, retry_after_s_max=_RETRY_AFTER_S_MAX)
        self.join(_SITE, engine)

    def join(self, name: str, engine: Engine) -> None:
        """Requests may go there from now on."""
        profile = engine.profile
        self._engines[name] = engine
        self.placing.join(
            name,
            profile.total_tokens,
            profile.page_tokens,
            GateLimits(
                prefill_chunk_tokens=profile.chunk_tokens,
                running_max=profile.running_max,
                engine_clip_tokens=profile.clip_tokens,
            ),
        )

    def close(self, name: str) -> None:
        """Nothing new goes there."""
        self.placing.sites[name].open = False

    def part(self, name: str) -> None:
        """It is empty and gone."""
        self.placing.part(name)
        del self._engines[name]

    def where(self, request: SimulatedRequest) -> str:
        """The engine that it was let into."""
        return self.placing.inside[request.id].site.id

    @property
    def gate(self) -> Gate:
        """Of the only engine."""
        return self.placing.sites[_SITE].gate

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

    def saw(self, moment: Moment, now: float, name: str = _SITE) -> None:
        site = self.placing.sites[name]
        self.placing.experience.observe_prefill(site, moment.prefilled_tokens, moment.attended, moment.seconds)
        if moment.steps:
            self.placing.experience.observe_step(site, moment.seconds / moment.steps)
        retractions = self._engines[name].totals.retractions
        if retractions > self._retractions.get(name, 0):
            self._retractions[name] = retractions
            self.placing.sites[name].gate.catch_up(now)
            self.placing.retracted(name)
        for request in moment.first:
            self.placing.progressed(request.id, 1, now)
        for request in moment.finished:
            del self._known[request.id]
            self.door.ended(request.id, Ended(request.produced, request.prompt_tokens - request.cached_tokens))

    def poll(self, now: float) -> None:
        for name, engine in self._engines.items():
            self.placing.reported(name, EngineReport(engine.pool.used_tokens, now, engine.new_token_ratio), now)
        self.door.tick(now)

    def waiting(self) -> int:
        return len(self.door.queue)

    def ask_at(self) -> float:
        return self._ask_at

    def turned_away(self) -> list[SimulatedRequest]:
        away, self._away = self._away, []
        return away

    def _produced(self, request: SimulatedRequest) -> int:
        return self._engines[self.where(request)].produced(request)

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
            produced=partial(self._produced, request),
            digest=_Digest(request.origin or request.id),
        )


class KnowingPlacing(Placing):
    """Told every output's length, and that the engine caches what it has seen."""

    def __init__(self, limits: PlacingLimits, requests: dict[str, SimulatedRequest]) -> None:
        super().__init__(limits, make_gate=_KnowingGate, experience=_KnowingExperience(limits, requests))


class _KnowingExperience(Experience):
    def __init__(self, limits: PlacingLimits, requests: dict[str, SimulatedRequest]) -> None:
        super().__init__(outputs_ahead=limits.outputs_ahead, trust_regrowth_s=limits.trust_regrowth_s)
        self._requests = requests

    def lengths_of(self, want: Want) -> LengthDistribution:
        return always(self._requests[want.request_id].output_tokens)

    def typical(self, want: Want) -> int:
        return self._requests[want.request_id].output_tokens


class _KnowingGate(Gate):
    """Its distributions are known lengths, so the peak is exact."""

    def peak_with(self, need: Need) -> float:
        known = [(resident, other.lengths.ceiling - produced) for other, resident, produced in self.known_running()]
        known.append((self.paged(need.private_tokens), need.lengths.ceiling))
        return peak_tokens(known)

    def _peak_fits(self, need: Need, planned: float) -> bool:
        return self.peak_with(need) <= planned
