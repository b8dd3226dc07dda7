"""One replica as admission sees it: who runs there, what they will take, and whether one more may enter now.

The decision joins four limits: pages (the peak forecast), time to the first token, time between tokens, and the
engine's own reserve. Pure: clocks and reports are handed in. Used by placing.py, in service and in the replay alike.
What a decision asks for is kept up as requests come, produce and go, so that it costs the same whoever runs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gateway.forecast import (
    MARGIN_MOST,
    Drift,
    EngineSpeed,
    Terms,
    UsageCurve,
    margin_share,
    peak_z,
    quantile_z,
)
from gateway.lengths import LengthDistribution
from gateway.need import Need, Running
from gateway.prefills import Prefills
from gateway.stalls import Stalls

# Of streams that start together this part may end before the length counted on; sooner, and a stall could have cost
# them their limit.
_EARLY_SHARE = 0.05
# A request that says nothing until it is whole counts as prefilled after its predicted time and this much more.
_UNHEARD_S = 0.05


class Entry(Enum):
    """May the request enter, or what does it wait for?"""

    NOW = "now"
    PAGES = "pages"
    PREFILL = "prefill"  # the engine has a prefill batch already: another would wait in its own queue
    BETWEEN = "between"  # some stream would pass its limit between tokens
    ENGINE = "engine"  # the engine's own reserve or its bound on running requests would refuse


@dataclass(frozen=True, slots=True)
class GateLimits:
    """What the engine's launch settings say, and what the operator risks.

    overflow_share: ε, how often the peak may pass capacity. margin_z: standard deviations of drift kept free.
    engine_clip_tokens: outputs that the engine reserves at most per request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION);
    0 where it reserves nothing. running_max: streams that the engine runs at once. unified: it prefills and decodes, so
    that a prefill stops its streams; else another engine prefills (prefill_half.py).
    """

    prefill_chunk_tokens: int
    running_max: int
    engine_clip_tokens: int
    overflow_share: float = 0.01
    margin_z: float = 2.0
    unified: bool = True


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The engine's own figures. asked_at: what entered later is not in them.

    new_token_ratio: of its reserve; 0 if unknown.
    """

    used_tokens: int
    asked_at: float
    new_token_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class _Refused:
    """What did not fit, while nothing has changed since: a larger one need not be asked about.

    short_of: as the gate's, 0 if it was not refused for the grant's sake.
    """

    private_tokens: int
    survival: tuple[float, ...]
    ceiling: int
    planned: float
    short_of: float


class Gate:
    """total_tokens, page_tokens: from the engine. One writer."""

    def __init__(self, total_tokens: int, page_tokens: int, limits: GateLimits, speed: EngineSpeed) -> None:
        self.total_tokens = total_tokens
        self.page_tokens = page_tokens
        self.limits = limits
        self.speed = speed
        self.drift = Drift()
        self.drift_tokens = 0
        # What may be planned with where other gateways plan as well; the engine's report has what they use now.
        self.granted_tokens: float = math.inf
        # The peak that was last refused for the grant's sake alone: so much would have to be granted.
        self.short_of: float = 0.0
        # Another gateway's request goes first: what leaves here is not planned with again.
        self.yields = False
        self._surely = total_tokens * (1 - MARGIN_MOST)  # planned with however old the report is
        self._z = peak_z(limits.overflow_share)
        self._curve = UsageCurve(self._z)
        self._running: dict[str, Running] = {}
        self._prefills = Prefills()
        self._stalls = Stalls(self._running)
        self._refused: _Refused | None = None
        self._used = 0.0
        # What is free by ledger and report, whichever says less.
        self.free_tokens: float = total_tokens
        # How full it is, to order replicas by: the part of the pool in use, and prefill batches under way.
        self.load = 0.0
        self._streams = 0
        self._reserved = 0  # by the engine, for outputs to come
        self._reported_used = 0.0
        self._reported_at = -math.inf
        self._unseen = 0
        self._reports = 0
        self._caught_up_at = -math.inf
        self._ratio = 1.0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def resident_tokens(self) -> float:
        """What the requests inside have in use now, by the ledger."""
        return self._curve.resident

    def entry(self, need: Need, now: float) -> Entry:
        """May it enter now? A replica that nobody uses takes whatever fits its whole pool."""
        used = self._used
        if not self._running and used <= 0 and self.granted_tokens >= self.total_tokens:
            return Entry.NOW
        private = need.private_tokens
        if used + private > self._surely or self._refused is not None:
            capacity = self.capacity(now)
            if used + private > capacity:
                return Entry.PAGES
            refused = self._was_refused(need, min(capacity, self.granted_tokens))
            if refused is not None:
                # A claim may have ended meanwhile that knew nothing of it, or been given up again.
                self.short_of = max(self.short_of, refused.short_of)
                return Entry.PAGES
        if self._streams + need.choices > self.limits.running_max and self._running:
            return Entry.ENGINE
        if self._prefills.tokens and self._crowded(need) and self._crowded_after(need, now):
            return Entry.PREFILL
        if self._running and (self.speed.step_s > need.between_s_max or self._stops_a_stream(need, now)):
            return Entry.BETWEEN
        capacity = self.capacity(now)
        planned = min(capacity, self.granted_tokens)
        if not self._peak_fits(need, planned):
            short_of = self._lacks(need, planned, capacity)
            if short_of:
                self.short_of = short_of
            self._refused = _Refused(private, need.lengths.survival, need.ceiling, planned, short_of)
            return Entry.PAGES
        return Entry.NOW if not self._running or self._engine_takes(need, used) else Entry.ENGINE

    def clears_in_s(self, entry: Entry, need: Need, now: float) -> float:
        """Seconds until the answer may be another although nobody has left or been heard of; inf where that can't be.

        BETWEEN: until running streams have saved enough time for its prefill.
        """
        if entry is Entry.BETWEEN:
            short_s = now + self._prefills.seconds_with(need, self.speed) - self._stalls.until(self.speed.step_s)
            saved_s = max(need.between_s_max - self.speed.step_s, 1e-3)  # as its neighbours' classes are like its own
            return max(1.0, short_s / saved_s) * self.speed.step_s
        if entry is Entry.PREFILL:
            ends_at = self._prefills.unheard_until()
            return math.inf if ends_at is None else max(1e-3, ends_at - now)
        return math.inf

    def capacity(self, now: float) -> float:
        """Tokens that may be planned with: all, less the margin for the age of the engine's report."""
        if self._reported_at == -math.inf or not self.drift.deviation:
            return self.total_tokens
        share = margin_share(drift_share=self.drift.deviation, age_s=now - self._reported_at, z=self.limits.margin_z)
        return self.total_tokens * (1 - share)

    def peak(self) -> float:
        """What use by the requests inside will peak at, with probability 1 - ε."""
        return self._curve.peak()

    def peak_with(self, need: Need) -> float:
        """As peak, if it enters."""
        return self._curve.peak_with(self._first_terms(need))

    def enter(self, need: Need, now: float, *, prompt_s: float = 0.0) -> None:
        """prompt_s: of a pair, until another engine has computed its prompt."""
        private = need.private_tokens
        length = max(1, need.lengths.quantile(_EARLY_SHARE))
        part = self._first_terms(need)
        running = Running(need, private, length, part.refresh_at, self._reports, now, now, need.lengths)
        self._running[need.id] = running
        self._prefills.add(running)
        running.prefilled_by = now + prompt_s + self.prefilling_s() + self.speed.step_s + _UNHEARD_S
        self._curve.add(need.id, part)
        self._streams += need.choices
        self._reserved += self._clipped(running)
        self._unseen += private
        self._changed()

    def catch_up(self, now: float) -> None:
        """Ask all whose tokens are seen how far they are; the others move on by the clock."""
        self._caught_up_at = now
        for request_id, running in self._running.items():
            if not running.need.heard:
                self._presume(running, now)
            elif (produced := running.need.produced()) > running.produced:
                self.progressed(request_id, produced, now)

    def progressed(self, request_id: str, produced: int, now: float) -> bool:
        """Each choice has produced so many tokens by now. True if the first such call: its prefill is over."""
        running = self._running.get(request_id)
        if running is None or produced <= running.produced:
            return False
        first = request_id in self._prefills
        if first:
            self._prefilled(running, now)
        self._reserved -= self._clipped(running)
        running.produced = produced
        self._reserved += self._clipped(running)
        self._stalls.progressed(running, self.speed.step_s)
        if produced >= running.redraw_at:
            self._redraw(request_id, running)
        return first

    def inherit(self, request_id: str, tokens: int) -> None:
        """A prefix that it shared has lost its other holder: the tokens are its own now."""
        running = self._running.get(request_id)
        if running is not None:
            running.private_tokens += tokens
            self._redraw(request_id, running)

    def recast(self, request_id: str, lengths: LengthDistribution) -> None:
        """Other lengths are believed of it now."""
        running = self._running.get(request_id)
        if running is not None:
            running.lengths = lengths
            self._redraw(request_id, running)

    def leave(self, request_id: str) -> bool:
        """It has left the engine; what a report counted of it is free. Idempotent: True if it was here."""
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        self._curve.remove(request_id)
        self._streams -= running.need.choices
        self._reserved -= self._clipped(running)
        if running.entered == self._reports:
            self._unseen -= running.need.private_tokens
        else:
            held = running.private_tokens + running.produced * running.need.choices
            self._reported_used = max(0.0, self._reported_used - held)
        self._prefills.remove(request_id)
        self._stalls.left(running)
        if self.yields:
            self.granted_tokens = min(self.granted_tokens, self.peak())
        self._changed()
        return True

    def reported(self, report: EngineReport, now: float) -> None:
        """The larger of report and ledger counts as used."""
        self.catch_up(now)
        self._reports += 1
        unseen = partly = 0
        for running in reversed(self._running.values()):
            if running.entered_at > report.asked_at:
                running.entered = self._reports
                unseen += running.need.private_tokens
            elif not self._prefills:
                break
            elif running.need.id in self._prefills:
                # A prompt that is being prefilled is in the ledger whole and in the report in part.
                partly += running.need.private_tokens
        resident, used = self._curve.resident, report.used_tokens
        known = min(max(used, resident - unseen - partly), resident)
        self.drift_tokens = round(used - known) if self._running else used
        if self._reported_at > -math.inf:
            self.drift.observe((used - known) / self.total_tokens, age_s=report.asked_at - self._reported_at)
        self._reported_used, self._reported_at, self._unseen = used, report.asked_at, unseen
        self._ratio = report.new_token_ratio
        self._changed()

    def room_in_s(self, need: Need, now: float, *, probability: float) -> float | None:
        """Seconds until its prompt's pages are free, if nobody else takes them; None if not foreseeable."""
        steps = self._curve.steps_until(
            need.private_tokens, quantile_z(probability), capacity=min(self.capacity(now), self.granted_tokens)
        )
        return None if steps is None else steps * self.speed.step_s

    def release_curve(self, probability: float) -> list[tuple[float, int]]:
        """Seconds from now, and the tokens that requests inside will have in use then at most, with `probability`."""
        return [
            (steps * self.speed.step_s, round(use)) for steps, use in self._curve.use_ahead(quantile_z(probability))
        ]

    def prefilling_s(self) -> float:
        """How long the prefills take that have been let in and are not over."""
        return self._prefills.seconds(self.speed)

    def first_token_s(self, need: Need) -> float:
        """How long after entering it has its first token: the prefills before it, its own, and a step."""
        return self._prefills.seconds_with(need, self.speed) + self.speed.step_s

    def unstarted(self, by: float) -> list[str]:
        """Who had entered by then and has no first token that is known of, the first at first."""
        return [running.need.id for running in self._prefills if running.entered_at <= by]

    def known_running(self) -> Iterator[tuple[Need, int, int]]:
        """Of each request inside: its need, its private tokens in whole pages, and what it has produced."""
        for running in self._running.values():
            tokens = running.private_tokens + running.produced * running.need.choices
            yield running.need, self.paged(tokens), running.produced

    def paged(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def _changed(self) -> None:
        self._refused = None
        self._used = max(self._curve.resident, self._reported_used + self._unseen)
        self.free_tokens = self.total_tokens - self._used
        self.load = self._used / self.total_tokens + self._prefills.tokens / self.limits.prefill_chunk_tokens

    def _was_refused(self, need: Need, planned: float) -> _Refused | None:
        refused = self._refused
        if (
            refused is not None
            and need.private_tokens >= refused.private_tokens
            and need.ceiling >= refused.ceiling
            and planned <= refused.planned
            and need.lengths.survival is refused.survival
        ):
            return refused
        return None

    def _peak_fits(self, need: Need, planned: float) -> bool:
        part, curve = self._first_terms(need), self._curve
        if curve.utmost + part.utmost <= planned:
            return True
        if curve.tight_with(part) > planned:
            return False
        return curve.most_with(part) <= planned or curve.peak_with(part) <= planned

    def _lacks(self, need: Need, planned: float, capacity: float) -> float:
        """What would have to be granted; 0 if it is not for the grant's sake that it does not fit."""
        peak = self.peak_with(need)
        if not self._running and peak > capacity:
            # Where nobody is it enters all the same, if all pages are there for it.
            return self.total_tokens if self.granted_tokens < self.total_tokens else 0.0
        return min(peak, capacity) if planned < capacity else 0.0

    def _resident(self, private_tokens: int, choices: int) -> int:
        """As planned with: between two horizons each choice may open a page more."""
        return self.paged(private_tokens) + choices * (self.page_tokens - 1)

    def _first_terms(self, need: Need) -> Terms:
        part = need.drawn.get(self.page_tokens)
        if part is None:
            resident = self._resident(need.private_tokens, need.choices)
            part = need.drawn[self.page_tokens] = Terms(resident, 0, need.lengths, choices=need.choices)
        return part

    def _redraw(self, request_id: str, running: Running) -> None:
        need = running.need
        resident = self._resident(running.private_tokens + running.produced * need.choices, need.choices)
        part = Terms(resident, running.produced, running.lengths, choices=need.choices)
        running.redraw_at = part.refresh_at
        self._curve.replace(request_id, part)
        self._changed()

    # Prefill and streams

    def _crowded(self, need: Need) -> bool:
        return self._prefills.tokens + need.uncached_tokens > self.limits.prefill_chunk_tokens

    def _crowded_after(self, need: Need, now: float) -> bool:
        """As _crowded, once those are left out that should be over and of which nothing can be heard."""
        for running in list(self._prefills):
            if not running.need.heard and now >= running.prefilled_by:
                self._prefilled(running, running.prefilled_by)
        return bool(self._prefills.tokens) and self._crowded(need)

    def _prefilled(self, running: Running, now: float) -> None:
        running.first_at = now
        self._prefills.remove(running.need.id)
        self._changed()

    def _presume(self, running: Running, now: float) -> None:
        """It is taken to produce a token a step, from the time its prefill should be over."""
        if now < running.prefilled_by:
            return
        if running.need.id in self._prefills:
            self._prefilled(running, running.prefilled_by)
        steps = int((now - running.first_at) / self.speed.step_s)
        produced = min(steps, running.need.ceiling - 1)
        if produced > running.produced:
            self.progressed(running.need.id, produced, now)

    def _stops_a_stream(self, need: Need, now: float) -> bool:
        """Would its prefill cost some stream its limit? What is known of streams is at most a step old then."""
        if not self.limits.unified:
            return False
        step_s, stall_s = self.speed.step_s, self._prefills.seconds_with(need, self.speed)
        if now + stall_s <= self._stalls.until(step_s):
            return False
        if now - self._caught_up_at < step_s:
            return True
        self.catch_up(now)
        return now + stall_s > self._stalls.until(step_s)

    # The engine's own reserve

    def _clipped(self, running: Running) -> int:
        clip = self.limits.engine_clip_tokens
        return min(running.need.ceiling - running.produced, clip) * running.need.choices if clip else 0

    def _engine_takes(self, need: Need, used: float) -> bool:
        """SGLang's own rule: what running requests may still produce, clipped and discounted, stays reserved."""
        clip = self.limits.engine_clip_tokens
        if not clip:
            return True
        reserved = self._ratio * self._reserved
        extend = need.uncached_tokens if self.limits.unified else need.private_tokens
        return extend + min(need.ceiling, clip) < self.total_tokens - used - reserved
