"""One replica as admission sees it: who runs there, what they will take, and whether one more may enter now.

The decision joins four limits: pages (the peak forecast), time to the first token, time between tokens, and the
engine's own reserve. Pure: clocks and reports are handed in. Used by whoever dispatches, in service and in the replay.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gateway.forecast import (
    Drift,
    EngineSpeed,
    Stream,
    Terms,
    UsageCurve,
    margin_share,
    peak_z,
    quantile_z,
    stall_allowed_s,
    terms,
)
from gateway.lengths import LengthDistribution

# Of streams that start together this part may end before the length counted on; sooner, and a stall could have cost
# them their limit.
_EARLY_SHARE = 0.05


class Entry(Enum):
    """May the request enter, or what does it wait for?"""

    NOW = "now"
    PAGES = "pages"
    PREFILL = "prefill"  # the engine has a prefill batch already: another would wait in its own queue
    BETWEEN = "between"  # some stream would pass its limit between tokens
    ENGINE = "engine"  # the engine's own reserve or its bound on running requests would refuse


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What the operator promises and the engine's launch settings say.

    overflow_share: ε, how often the peak may pass capacity. margin_z: standard deviations of drift kept free.
    engine_clip_tokens: outputs that the engine reserves at most per request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
    """

    between_s_max: float
    prefill_chunk_tokens: int
    running_max: int
    engine_clip_tokens: int
    overflow_share: float = 0.01
    margin_z: float = 2.0


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of this replica, in tokens of all its choices together.

    shared: of the prompt, what running requests hold already. uncached: what is to be prefilled. ceiling and lengths:
    of each choice.
    """

    id: str
    prompt_tokens: int
    shared_tokens: int
    uncached_tokens: int
    ceiling: int
    lengths: LengthDistribution
    choices: int = 1

    @property
    def attended(self) -> float:
        """Each token to prefill times its mean context."""
        return self.uncached_tokens * (self.prompt_tokens - self.uncached_tokens / 2)


@dataclass(slots=True)
class _Running:
    need: Need
    private_tokens: int
    length: int
    redraw_at: int
    entered: int  # how many reports there had been
    produced: int = 0
    first_at: float = 0.0


class Gate:
    """total_tokens, page_tokens: from the engine. One writer; decisions cost one pass over the running requests."""

    def __init__(self, total_tokens: int, page_tokens: int, limits: GateLimits, speed: EngineSpeed) -> None:
        self.total_tokens = total_tokens
        self.page_tokens = page_tokens
        self.limits = limits
        self.speed = speed
        self.drift = Drift()
        self._z = peak_z(limits.overflow_share)
        self._curve = UsageCurve()
        self._running: dict[str, _Running] = {}
        self._drawn: tuple[Need, Terms] | None = None
        self._prefilling = 0
        self._attended = 0.0
        self._reported_used = 0.0
        self._reported_at = -math.inf
        self._unseen = 0
        self._reports = 0
        self._ratio = 1.0

    def __len__(self) -> int:
        return len(self._running)

    def entry(self, need: Need, now: float) -> Entry:
        """May it enter now? An idle replica takes whatever fits its whole pool."""
        if not self._running:
            return Entry.NOW
        if self._prefilling and self._prefilling + need.uncached_tokens > self.limits.prefill_chunk_tokens:
            return Entry.PREFILL
        if len(self._running) >= self.limits.running_max:
            return Entry.ENGINE
        if self._stall_s(need) > self._stall_allowed_s(now) or self.speed.step_s > self.limits.between_s_max:
            return Entry.BETWEEN
        capacity = self.capacity(now)
        used = max(self._curve.resident, self._reported_used + self._unseen)
        if used + need.prompt_tokens - need.shared_tokens > capacity:
            return Entry.PAGES
        if self._curve.most_with(self._first_terms(need)) > capacity and self.peak_with(need) > capacity:
            return Entry.PAGES
        return Entry.NOW if self._engine_takes(need, used) else Entry.ENGINE

    def between_clears_s(self, need: Need, now: float) -> float:
        """Seconds until running streams have saved enough time for its prefill, if nobody leaves."""
        short_s = self._stall_s(need) - self._stall_allowed_s(now)
        saved_s = max(self.limits.between_s_max - self.speed.step_s, 1e-3)
        return max(1.0, short_s / saved_s) * self.speed.step_s

    def capacity(self, now: float) -> float:
        """Tokens that may be planned with: all, less the margin for the age of the engine's report."""
        age_s = now - self._reported_at if self._reported_at > -math.inf else 0.0
        share = margin_share(drift_share=self.drift.deviation, age_s=age_s, z=self.limits.margin_z)
        return self.total_tokens * (1 - share)

    def peak_with(self, need: Need) -> float:
        """What use will peak at if it enters, with probability 1 - ε."""
        return self._curve.peak_with(self._first_terms(need), self._z)

    def enter(self, need: Need) -> None:
        private = need.prompt_tokens - need.shared_tokens
        length = max(1, need.lengths.quantile(_EARLY_SHARE))
        part = self._first_terms(need)
        self._running[need.id] = _Running(need, private, length, part.refresh_at, self._reports)
        self._curve.add(need.id, part)
        self._prefilling += need.uncached_tokens
        self._attended += need.attended
        self._unseen += private

    def progressed(self, request_id: str, produced: int, now: float) -> None:
        """Each choice has produced so many tokens by now; the first such call also says that its prefill is over."""
        running = self._running.get(request_id)
        if running is None or produced <= running.produced:
            return
        if not running.produced:
            running.first_at = now
            self._prefilled(running.need)
        running.produced = produced
        if produced >= running.redraw_at:
            self._redraw(request_id, running)

    def inherit(self, request_id: str, tokens: int) -> None:
        """A prefix that it shared has lost its other holder: the tokens are its own now."""
        running = self._running.get(request_id)
        if running is not None:
            running.private_tokens += tokens
            self._redraw(request_id, running)

    def leave(self, request_id: str) -> None:
        """It has left the engine. Idempotent."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        self._curve.remove(request_id)
        if running.entered == self._reports:
            self._unseen -= running.need.prompt_tokens - running.need.shared_tokens
        if not running.produced:
            self._prefilled(running.need)

    def reported(self, used_tokens: int, new_token_ratio: float, now: float, *, unseen_tokens: int = 0) -> None:
        """The engine's own report, as of now. The larger of report and ledger counts as used.

        unseen_tokens: of requests that entered after the engine was asked.
        """
        # A prompt that is being prefilled is in the ledger whole and in the report in part.
        known = max(self._curve.resident - self._prefilling, min(used_tokens, self._curve.resident))
        difference = (used_tokens - known) / self.total_tokens
        if self._reported_at > -math.inf:
            self.drift.observe(difference, age_s=now - self._reported_at)
        self._reported_used, self._reported_at, self._unseen = used_tokens, now, unseen_tokens
        self._reports += 1
        self._ratio = new_token_ratio

    def room_in_s(self, need: Need, now: float, *, probability: float) -> float | None:
        """Seconds until its prompt's pages are free, if nobody else takes them; None if not foreseeable."""
        steps = self._curve.steps_until(
            need.prompt_tokens - need.shared_tokens, quantile_z(probability), capacity=self.capacity(now)
        )
        return None if steps is None else steps * self.speed.step_s

    def prefilling_s(self) -> float:
        """How long the prefills take that have been let in and are not over."""
        return self.speed.prefill_s(self._prefilling, self._attended)

    def known_running(self) -> Iterator[tuple[Need, int, int]]:
        """Of each request inside: its need, its private tokens in whole pages, and what it has produced."""
        for running in self._running.values():
            tokens = running.private_tokens + running.produced * running.need.choices
            yield running.need, self.paged(tokens), running.produced

    def paged(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def _resident(self, private_tokens: int, choices: int) -> int:
        """As planned with: between two horizons each choice may open a page more."""
        return self.paged(private_tokens) + choices * (self.page_tokens - 1)

    def _first_terms(self, need: Need) -> Terms:
        # Asked for by the decision, and again by entering: kept for the request that was last asked about.
        if self._drawn is None or self._drawn[0] is not need:
            resident = self._resident(need.prompt_tokens - need.shared_tokens, need.choices)
            self._drawn = (need, terms(resident, 0, need.lengths, choices=need.choices))
        return self._drawn[1]

    def _redraw(self, request_id: str, running: _Running) -> None:
        need = running.need
        resident = self._resident(running.private_tokens + running.produced * need.choices, need.choices)
        part = terms(resident, running.produced, need.lengths, choices=need.choices)
        running.redraw_at = part.refresh_at
        self._curve.replace(request_id, part)

    def _prefilled(self, need: Need) -> None:
        self._prefilling -= need.uncached_tokens
        self._attended = self._attended - need.attended if self._prefilling else 0.0

    def _stall_s(self, need: Need) -> float:
        """How long decoding stops if it enters: the prefills before it and its own."""
        return self.speed.prefill_s(self._prefilling + need.uncached_tokens, self._attended + need.attended)

    def _stall_allowed_s(self, now: float) -> float:
        if self.limits.between_s_max == math.inf:
            return math.inf
        streams = [
            Stream(running.produced, now - running.first_at, running.length)
            for running in self._running.values()
            if running.produced
        ]
        return stall_allowed_s(streams, step_s=self.speed.step_s, between_s_max=self.limits.between_s_max)

    def _engine_takes(self, need: Need, used: float) -> bool:
        """SGLang's own rule: what running requests may still produce, clipped and discounted, stays reserved."""
        clip = self.limits.engine_clip_tokens
        if not clip:
            return True
        reserved = self._ratio * sum(
            min(running.need.ceiling - running.produced, clip) for running in self._running.values()
        )
        return need.uncached_tokens + min(need.ceiling, clip) < self.total_tokens - used - reserved
