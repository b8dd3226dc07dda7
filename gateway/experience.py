"""What was learned of one model's requests and engines, and what a request will take therefore.

Kept by placing.py and asked by search.py: lengths of outputs, speeds, how far engines' caches are to be believed, and
whose lengths are doubted. Knows no order of replicas and nobody inside.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from gateway.doubt import PARTS, Doubt
from gateway.fairness import dominant_seconds
from gateway.forecast import EngineSpeed, attended_by
from gateway.gate import Gate
from gateway.lengths import LengthDistribution, LengthKey, OutputLengths, bucket_of, doubted, expected_about
from gateway.need import Need
from gateway.prefill_half import PrefillHalf
from gateway.prefixes import Known
from gateway.site import Placed, Site
from gateway.want import Ended, Expected, Want

# As unproven: they shape charges and hints until requests have shown better.
_FIRST_PREFILL_TOKENS_S = 20_000.0
_FIRST_STEP_S = 0.01
# What a replica can decode at once is counted in streams of this context.
_STREAM_TOKENS = 4096
# The engine's cache is believed in by what it has saved, an exponential mean over about the last so many requests;
# running requests are taken to share pages once nearly all that was expected has come.
_TRUST_PACE = 1 / 8
_SHARES_FROM = 0.9
# What a request produces past this quantile of the learned lengths was not foreseen.
_FORESEEN_LENGTHS = 0.9
# Below this a mean time between tokens is one token's chance.
_STEPS_WORTH_LEARNING = 4


@dataclass(slots=True)
class Trust:
    """How much of the cached tokens that were expected has come."""

    share: float = 0.0

    def observe(self, *, expected: int, cached: int) -> None:
        if expected:
            self.share += _TRUST_PACE * (min(1.0, cached / expected) - self.share)


class Experience:
    """outputs_ahead: counted on before there is history. trust_regrowth_s: as of doubt.py."""

    def __init__(self, *, outputs_ahead: int, trust_regrowth_s: float) -> None:
        self.lengths = OutputLengths()
        self.speed = EngineSpeed(prefill_tokens_s=_FIRST_PREFILL_TOKENS_S, step_s=_FIRST_STEP_S)
        self.trust = Trust()
        self.doubt = Doubt(trust_regrowth_s)
        self._outputs_ahead = outputs_ahead
        # Of the smallest replica: its pages, their tokens, and the streams that it decodes at once.
        self._nominal = (_STREAM_TOKENS, 1, 1)

    def measure(self, gates: Iterable[Gate]) -> None:
        """These are the replicas now."""
        gate = min(gates, key=lambda gate: gate.total_tokens, default=None)
        self._nominal = (_STREAM_TOKENS, 1, 1)
        if gate is not None:
            streams = max(1, min(gate.limits.running_max, gate.total_tokens // _STREAM_TOKENS))
            self._nominal = (max(1, gate.total_tokens // gate.page_tokens), gate.page_tokens, streams)

    def speed_of_new(self) -> EngineSpeed:
        """Of a replica or half that has not shown its own yet: as the others'."""
        return EngineSpeed(prefill_tokens_s=1 / self.speed.prefill_token_s, step_s=self.speed.step_s)

    # What a request will take

    def lengths_of(self, want: Want) -> LengthDistribution:
        """As believed, with what doubt there is of its tenant."""
        parts = self.doubt.of(want.tenant)
        return doubted(self._learned(want), parts / PARTS) if parts else self._learned(want)

    def typical(self, want: Want) -> int:
        """Outputs of each choice, as such requests' mostly are."""
        return self.lengths.typical(_key(want), ceiling=want.cap_tokens)

    def unforeseen(self, want: Want, produced: int) -> int:
        """Of what each choice has produced, how much runs past all that was learned to expect."""
        return max(0, produced - self._learned(want).quantile(_FORESEEN_LENGTHS))

    def cached(self, known: Known) -> int:
        """Of the tokens expected in a cache, those believed to be there."""
        return int(known.cached_tokens * self.trust.share)

    def expected(self, want: Want, known: Known) -> Expected:
        """known: of its prompt, where most of it is."""
        uncached = want.prompt_tokens - self.cached(known)
        cost_s = self._cost_s(want, uncached=uncached, produced=self.typical(want))
        first_s = self.speed.prefill_s(uncached, attended_by(uncached, want.prompt_tokens)) + self.speed.step_s
        return Expected(cost_s, first_s, 1 - uncached / want.prompt_tokens)

    def need(self, want: Want, site: Site, lengths: LengthDistribution, known: Known) -> Need:
        """What it asks of this replica. known: of its prompt there."""
        # Choices that could not all stand side by side run one after another: together they need the whole pool.
        prompt = min(want.prompt_tokens * want.choices, site.gate.total_tokens)
        # Of what another engine computes nothing is computed here, and nothing that it sends is shared here.
        apart = site.halves is not None
        uncached = 0 if apart else prompt - (self.cached(known) if want.choices == 1 else 0)
        shared = known.shared_tokens if not apart and self.trust.share >= _SHARES_FROM and want.choices == 1 else 0
        return Need(
            want.request_id,
            prompt_tokens=prompt,
            shared_tokens=shared,
            uncached_tokens=uncached,
            ceiling=want.cap_tokens,
            lengths=lengths,
            choices=want.choices,
            between_s_max=want.between_s_max,
            heard=want.heard,
            produced=want.produced,
        )

    # What is learned

    def ended(self, placed: Placed, end: Ended) -> float:
        """Lengths, speeds and trust learn from it. The dominant seconds that it took."""
        want = placed.want
        self.lengths.observe(_key(want), end.produced)
        if not end.produced:
            return 0.0
        self.trust.observe(expected=placed.known.cached_tokens, cached=want.prompt_tokens - end.uncached)
        self._learn_speed(placed, end)
        return self._cost_s(want, uncached=end.uncached, produced=end.produced)

    def observe_prefill(self, site: Site | PrefillHalf, tokens: int, attended: float, seconds: float) -> None:
        """attended: as of forecast.py."""
        site.speed.observe_prefill(tokens, attended, seconds)
        self.speed.observe_prefill(tokens, attended, seconds)

    def observe_step(self, site: Site, seconds: float) -> None:
        site.speed.observe_step(seconds)
        self.speed.observe_step(seconds)

    def _learn_speed(self, placed: Placed, end: Ended) -> None:
        if end.first_s is not None:
            where = placed.site if placed.quote is None else placed.quote.half
            looked_back = attended_by(end.uncached, placed.want.prompt_tokens)
            self.observe_prefill(where, end.uncached, looked_back, end.first_s)
        if end.between_s is not None:
            self.observe_step(placed.site, end.between_s)
        elif end.first_s is None and end.whole_s is not None and end.produced >= _STEPS_WORTH_LEARNING:
            self.observe_step(placed.site, max(0.0, end.whole_s - placed.first_s) / end.produced)

    def _learned(self, want: Want) -> LengthDistribution:
        """Learned; before there is history, what is held ahead of a stream, and then as long again."""
        key = _key(want)
        if self.lengths.has_history(key):
            return self.lengths.distribution(key, ceiling=want.cap_tokens)
        return expected_about(min(want.cap_tokens, self._outputs_ahead), ceiling=want.cap_tokens)

    def _cost_s(self, want: Want, *, uncached: int, produced: int) -> float:
        pages, page_tokens, streams = self._nominal
        speed, choices = self.speed, want.choices
        prefill_s, step_s = uncached * speed.prefill_token_s, produced * speed.step_s
        resident = choices * (want.prompt_tokens + produced / 2)
        return dominant_seconds(
            prefill_s=prefill_s,
            decode_s=choices * step_s / streams,
            # Page-seconds count steps of the nominal time: a neighbour's slowness is not charged.
            pages_s=resident / page_tokens * (prefill_s + step_s) / pages,
        )


def _key(want: Want) -> LengthKey:
    return _length_key(want.tenant, want.endpoint, want.cap_tokens)


@lru_cache(4096)
def _length_key(tenant: str, endpoint: str, cap_tokens: int) -> LengthKey:
    return LengthKey("", tenant, endpoint, bucket_of(cap_tokens))
