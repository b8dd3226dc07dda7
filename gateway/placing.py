"""Where does a request go, and what becomes of it there? The replicas of one model, and who is inside each.

One half of the door (door.py), in service and in the replay. search.py finds where a request fits, experience.py says
what it will take and learns from how it ended. Pure: clocks and reports are handed in.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.calibration import Coverage, Inside
from gateway.experience import Experience
from gateway.gate import EngineReport, Entry, Gate, GateLimits
from gateway.need import Need
from gateway.prefill_half import PrefillHalf
from gateway.prefixes import NOTHING_KNOWN, Prefixes
from gateway.routing import by_load
from gateway.search import FORESEEN_SITES_MAX, Found, Search
from gateway.site import Placed, Site, open_to
from gateway.want import Ended, Expected, Want
from gateway.whereabouts import Whereabouts

_NOBODY: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class PlacingLimits:
    """overflow_share, margin_z: as of the gate. outputs_ahead: counted on before there is history.

    affinity_s_max: seconds that a cached prefix or a session may delay the first token over the best replica.
    sessions_max: remembered. coverage_every: of so many decisions the truth of one is followed, and everybody's terms
    are drawn for it. trust_regrowth_s: as of doubt.py.
    """

    overflow_share: float = 0.01
    margin_z: float = 2.0
    outputs_ahead: int = 1024
    affinity_s_max: float = 1.0
    sessions_max: int = 16384
    coverage_every: int = 32
    trust_regrowth_s: float = 300.0


class Placing:
    """make_gate: another one for an oracle; experience: too. seed: another in each process. Sites `join`, and `part`
    with all inside.
    """

    def __init__(
        self,
        limits: PlacingLimits,
        *,
        make_gate: Callable[..., Gate] = Gate,
        experience: Experience | None = None,
        seed: int = 0,
    ) -> None:
        self.limits = limits
        self.sites: dict[str, Site] = {}
        self.halves: dict[str, PrefillHalf] = {}  # that compute prompts for sites that only decode
        self.inside: dict[str, Placed] = {}
        self.experience = experience or Experience(
            outputs_ahead=limits.outputs_ahead, trust_regrowth_s=limits.trust_regrowth_s
        )
        self.whereabouts = Whereabouts(sessions_max=limits.sessions_max)
        self.coverage = Coverage(every=limits.coverage_every)
        # After `place` found nothing: as of Search.
        self.ask_again_s = math.inf
        self.waits_in: Mapping[str, float] | None = None
        self.waits_for_prefill = False
        # As of Grounds.
        self.apart = False
        self.ramping = False
        self.draw = random.Random(seed)  # noqa: S311 - spreads load, guards nothing
        # What a new replica may be planned with: all, or nothing until a board has granted something.
        self.first_grant: float = math.inf
        self._make_gate = make_gate

    @property
    def affinity_s_max(self) -> float:
        return self.limits.affinity_s_max

    # Replicas

    def join(self, site_id: str, total_tokens: int, page_tokens: int, limits: GateLimits) -> Site:
        """A replica with this pool. One that has come back with another pool starts anew, and nobody is inside."""
        site = self.sites.get(site_id)
        if site is not None and site.gate.total_tokens == total_tokens and site.gate.page_tokens == page_tokens:
            if site.gate.limits != limits:
                site.gate.limits = limits
                self._measure()
            return site
        if site is not None:
            self.part(site_id)
        speed = self.experience.speed_of_new()
        gate = self._make_gate(total_tokens, page_tokens, limits, speed)
        gate.granted_tokens = self.first_grant
        site = self.sites[site_id] = Site(site_id, gate, Prefixes(total_tokens), speed)
        self._measure()
        return site

    def part(self, site_id: str) -> None:
        """It is gone, with all that was inside: an engine that starts again has forgotten everything."""
        site = self.sites.pop(site_id, None)
        if site is not None:
            for request_id in [name for name, placed in self.inside.items() if placed.site is site]:
                self.prompt_done(request_id)
                del self.inside[request_id]
            self.whereabouts.forget(site_id)
            self.apart = len({known.region for known in self.sites.values()}) > 1
            self._measure()

    def join_half(
        self, half_id: str, total_tokens: int, *, tokens_ahead_max: int, takes: Callable[[int, int], bool]
    ) -> PrefillHalf:
        """A prefill half with this pool. Which sites it computes prompts for is said there."""
        half = self.halves.get(half_id)
        if half is None:
            speed = self.experience.speed_of_new()
            half = PrefillHalf(half_id, Prefixes(total_tokens), speed, tokens_ahead_max, takes)
            self.halves[half_id] = half
        return half

    def part_half(self, half_id: str) -> None:
        """It is gone, or has started anew and forgotten everything; requests whose prompt it had will say so."""
        gone = self.halves.pop(half_id, None)
        if gone is not None:
            gone.open = False

    def locate(self, site_id: str, region: str, away_s: float) -> None:
        """Where it is, and the round trip there in seconds; 0 where this gateway is."""
        site = self.sites[site_id]
        site.region, site.away_s = region, away_s
        self.apart = len({known.region for known in self.sites.values()}) > 1

    def _measure(self) -> None:
        self.experience.measure(site.gate for site in self.sites.values())

    def reported(self, site_id: str, report: EngineReport, now: float) -> None:
        self.sites[site_id].gate.reported(report, now)

    # Decisions

    def expect(self, want: Want) -> Expected:
        """What it will take, at the replica that has most of its prompt."""
        best = NOTHING_KNOWN
        for _, known in self.whereabouts.near(want, self.sites):
            if known.cached_tokens > best.cached_tokens:
                best = known
        for half in self.halves.values() if want.blocks else ():
            known = half.prefixes.known(want.blocks, want.prompt_tokens)
            if half.open and known.cached_tokens > best.cached_tokens:
                best = known
        return self.experience.expected(want, best)

    def will_hold(self, want: Want) -> int:
        """Tokens that it will hold at its end, if its choices become as long as such requests' typically do."""
        return want.choices * (want.prompt_tokens + self.experience.typical(want))

    def place(
        self, want: Want, now: float, *, charged_s: float, beyond: Mapping[str, float] = _NOBODY
    ) -> Placed | None:
        """It enters where it fits, or nowhere: then `ask_again_s` says when the answer may be another by itself, and
        `waits_in` where that is. beyond: as of Search.
        """
        found = self._fits(want, now, beyond)
        if found is None:
            return None
        site, need = found.site, found.need
        first_s = site.gate.first_token_s(need) + (0.0 if found.quote is None else found.quote.in_s)
        return self._enter(Placed(want, site, charged_s, found.known, first_s, now, found.quote), need)

    def wait_behind(self, want: Want) -> None:
        """It is not asked for: others wait before it wherever it may go."""
        self.waits_in = None if want.regions is None else dict.fromkeys(want.regions, math.inf)

    def would_take(self, want: Want, now: float) -> Site | None:
        """The replica that it would enter now."""
        found = self._fits(want, now)
        return None if found is None else found.site

    def need(self, want: Want, site: Site) -> Need:
        """What it asks of this replica, if nothing of it is there."""
        return self.experience.need(want, site, self.experience.lengths_of(want), NOTHING_KNOWN)

    def _fits(self, want: Want, now: float, beyond: Mapping[str, float] = _NOBODY) -> Found | None:
        search = Search(self, want, now, beyond)
        found = search.find()
        self.ask_again_s, self.waits_in = search.ask_again_s, search.waits_in
        self.waits_for_prefill = search.waits_for_prefill
        return found

    def verdicts(self, want: Want, now: float) -> dict[str, Entry]:
        """What each replica would say now, for explanations."""
        lengths = self.experience.lengths_of(want)
        return {
            site.id: site.gate.entry(self.experience.need(want, site, lengths, NOTHING_KNOWN), now)
            for site in open_to(want, self.sites.values())
        }

    def room_in_s(self, want: Want, now: float, *, probability: float) -> float | None:
        """Seconds until one of the emptiest replicas has its prompt's pages; None if nobody foresees it."""
        lengths = self.experience.lengths_of(want)
        foreseen = []
        for site in by_load(open_to(want, self.sites.values()))[:FORESEEN_SITES_MAX]:
            need = self.experience.need(want, site, lengths, NOTHING_KNOWN)
            seconds = site.gate.room_in_s(need, now, probability=probability)
            foreseen += [] if seconds is None else [seconds]
        return min(foreseen, default=None)

    # What becomes of requests

    def progressed(self, request_id: str, produced: int, now: float) -> bool:
        """Each of its choices has produced about so many tokens. True if its prefill is now known to be over."""
        placed = self.inside.get(request_id)
        return placed is not None and placed.site.gate.progressed(request_id, produced, now)

    def prompt_done(self, request_id: str) -> None:
        """Its prefill half has handed its prompt over, or given it up. Idempotent."""
        placed = self.inside.get(request_id)
        if placed is not None and placed.quote is not None:
            placed.quote.half.leave(request_id)

    def stopped(self, request_id: str) -> bool:
        """Its pages are free: it has left its engine. What it came to is told by `ended`. Idempotent."""
        placed = self.inside.get(request_id)
        if placed is None or not placed.site.gate.leave(request_id):
            return False
        if placed.quote is not None:
            placed.quote.half.leave(request_id)
            return True
        for heir, tokens in placed.site.prefixes.left(request_id, placed.want.blocks).items():
            placed.site.gate.inherit(heir, tokens)
        return True

    def ended(self, request_id: str, end: Ended) -> float:
        """What it turned out to be: lengths and speeds learn from it. Dominant seconds that it took beyond its charge.

        Idempotent: 0 where it is not known any more.
        """
        self.stopped(request_id)
        placed = self.inside.pop(request_id, None)
        if placed is None:
            return 0.0
        self.coverage.ended(request_id, end.produced)
        return self.experience.ended(placed, end) - placed.charged_s

    def retracted(self, site_id: str) -> frozenset[str]:
        """The engine has taken pages back from requests. Whose requests ran past what was forecast is planned with more
        carefully from now on, also what it has running anywhere. Those tenants.
        """
        beyond: dict[str, int] = {}
        for need, _, produced in self.sites[site_id].gate.known_running():
            want = self.inside[need.id].want
            unforeseen = self.experience.unforeseen(want, produced) * need.choices
            beyond[want.tenant] = beyond.get(want.tenant, 0) + unforeseen
        blamed = self.experience.doubt.retracted(beyond)
        for request_id, placed in self.inside.items() if blamed else ():
            if placed.want.tenant in blamed:
                placed.site.gate.recast(request_id, self.experience.lengths_of(placed.want))
        return blamed

    def _enter(self, placed: Placed, need: Need) -> Placed:
        want, site = placed.want, placed.site
        if self.coverage.wants():
            inside = [
                Inside(other.id, resident, produced, other.choices)
                for other, resident, produced in site.gate.known_running()
            ]
            inside.append(Inside(need.id, site.gate.paged(need.private_tokens), 0, need.choices))
            self.coverage.decided(site.gate.peak_with(need), inside)
        quote = placed.quote
        site.gate.enter(need, placed.entered_at, prompt_s=0.0 if quote is None else quote.in_s)
        if quote is not None:
            quote.half.enter(want.request_id, quote, want.blocks)
        else:
            site.prefixes.entered(want.request_id, want.blocks)
            self.whereabouts.note_prompt(want, site.id)
        self.whereabouts.note_session(want, site.id if quote is None else quote.half.id)
        self.inside[want.request_id] = placed
        if site.premises is not None:
            site.premises.take(want, placed.entered_at, "" if quote is None else quote.half.id)
        return placed
