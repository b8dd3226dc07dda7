"""Where does a request go, and what will it take? The replicas of one model, and what was learned of its requests.

One half of the door (door.py), in service and in the replay: asks gates (gate.py) in the order of routing.py, and
learns lengths, speeds and what prefixes save from requests that have ended. Pure: clocks and reports are handed in.
"""

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from gateway.calibration import Coverage, Inside
from gateway.doubt import PARTS, Doubt
from gateway.fairness import dominant_seconds
from gateway.forecast import EngineSpeed
from gateway.gate import EngineReport, Entry, Gate, GateLimits
from gateway.lengths import LengthDistribution, LengthKey, OutputLengths, bucket_of, doubted, expected_about
from gateway.need import Need
from gateway.prefill_half import PrefillHalf, Prompt, Quote
from gateway.prefill_half import choose as choose_half
from gateway.prefixes import NOTHING_KNOWN, Known, Prefixes
from gateway.regions import DEFAULT_REGION, allows, choose
from gateway.routing import LOAD, by_load, with_affinity
from tenancy.values import value

# As unproven: they shape charges and hints until requests have shown better.
_FIRST_PREFILL_TOKENS_S = 20_000.0
_FIRST_STEP_S = 0.01
# What a replica can decode at once is counted in streams of this context.
_STREAM_TOKENS = 4096
# The engine's cache is believed in by what it has saved, an exponential mean over about the last so many requests;
# running requests are taken to share pages once nearly all that was expected has come.
_TRUST_PACE = 1 / 8
_SHARES_FROM = 0.9
# Of more replicas than this so many are asked first, drawn anew for each request.
_ASKED_AT_FIRST = 64
# So many replicas, the emptiest, are asked when they will have room.
_FORESEEN_SITES_MAX = 4
# A local start is foreseen by the median: later than that it is as often as sooner.
_FORESEEN_PROBABILITY = 0.5
_NOBODY: Mapping[str, float] = {}
# What a request produces past this quantile of the learned lengths was not foreseen.
_FORESEEN_LENGTHS = 0.9
# Below this a mean time between tokens is one token's chance.
_STEPS_WORTH_LEARNING = 4


@value
class Want:
    """What a request asks for: its exact prompt, and the most that each of its choices may produce.

    blocks: of the prompt (prefixes.py). session: the client's word for requests that belong together, within the
    tenant; empty for none. first_s_max, between_s_max: what its class promises. heard: its tokens are seen as they
    come, and `produced` says how many each choice has. digest: of the prompt, to know the request again when it comes
    back; asked for only where somebody waits. regions: where its prompt may go, whatever else; None: anywhere.
    revision: of the model, that serves it; empty for any. elsewhere: where that one has no room now, another may.
    """

    request_id: str
    tenant: str
    endpoint: str
    prompt_tokens: int
    choices: int
    cap_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    tier: int = 0
    weight: float = 1.0
    first_s_max: float = math.inf
    between_s_max: float = math.inf
    heard: bool = True
    produced: Callable[[], int] = int
    digest: Callable[[], bytes] = bytes
    regions: frozenset[str] | None = None
    revision: str = ""
    elsewhere: bool = True


@value
class Ended:
    """What a request turned out to be. produced: by its longest choice; 0 if the engine never started it.

    uncached: prompt tokens that were prefilled. between_s: the mean time between its tokens; first_s: from dispatch to
    its first token; whole_s: from dispatch to its end. None where not seen.
    """

    produced: int
    uncached: int
    first_s: float | None = None
    between_s: float | None = None
    whole_s: float | None = None


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


@value
class Expected:
    """A request's forecast. cost_s: dominant seconds of a replica. first_s: from entering an engine that prefills
    nothing else to its first token. cached_share: of its prompt, at the replica that has most of it.
    """

    cost_s: float
    first_s: float
    cached_share: float


class Premises(Protocol):
    """What a replica keeps beside its forecast: pages held by number, and those of the half that computes a prompt."""

    def take(self, want: Want, now: float, half_id: str) -> None:
        """It enters. half_id: the prefill half that computes its prompt; empty where the replica does."""


@dataclass(eq=False, slots=True)
class Site:
    """One replica. open: it takes new requests. on_trial: one at a time, until one has ended well.

    halves: of a replica that only decodes, the open ones that may compute prompts for it; None: it does both.
    away_s: the round trip to its region. share: of what others carry, as much as it may since it came back.
    revision: of the model, that it serves.
    """

    id: str
    gate: Gate
    prefixes: Prefixes
    speed: EngineSpeed
    open: bool = True
    on_trial: bool = False
    premises: Premises | None = None
    region: str = DEFAULT_REGION
    away_s: float = 0.0
    share: float = 1.0
    revision: str = ""
    halves: tuple[PrefillHalf, ...] | None = None

    @property
    def load(self) -> float:
        return self.gate.load


@value
class Placed:
    """A request inside. known: of its prefix when it entered. first_s: predicted then, to its first token. quote: of
    the prefill half that computes its prompt; None where its replica does.
    """

    want: Want
    site: Site
    charged_s: float
    known: Known
    first_s: float
    entered_at: float
    quote: Quote | None = None


@value
class _Found:
    """Where it fits. quote: as of Placed."""

    site: Site
    need: Need
    known: Known
    quote: Quote | None = None


@dataclass(slots=True)
class _Trust:
    """How much of the cached tokens that were expected has come."""

    share: float = 0.0

    def observe(self, *, expected: int, cached: int) -> None:
        if expected:
            self.share += _TRUST_PACE * (min(1.0, cached / expected) - self.share)


class Placing:
    """make_gate: another one for an oracle. seed: another in each process. Sites `join`, and `part` with all inside."""

    def __init__(self, limits: PlacingLimits, *, make_gate: Callable[..., Gate] = Gate, seed: int = 0) -> None:
        self.limits = limits
        self.sites: dict[str, Site] = {}
        self.halves: dict[str, PrefillHalf] = {}  # that compute prompts for sites that only decode
        self.inside: dict[str, Placed] = {}
        self.lengths = OutputLengths()
        self.speed = EngineSpeed(prefill_tokens_s=_FIRST_PREFILL_TOKENS_S, step_s=_FIRST_STEP_S)
        self.coverage = Coverage(every=limits.coverage_every)
        self.trust = _Trust()
        self.doubt = Doubt(limits.trust_regrowth_s)
        self.ask_again_s = math.inf
        # After `place` found nothing: where it waits, and the seconds to its first token there. None: anywhere.
        self.waits_in: Mapping[str, float] | None = None
        # After `place` found nothing: was it a prefill half that was missing, and not pages of those that decode?
        self.waits_for_prefill = False
        # Are its replicas in several regions? With one nothing is spent on the question.
        self.apart = False
        self.ramping = False  # has one of its replicas just come back?
        # What a new replica may be planned with: all, or nothing until a board has granted something.
        self.first_grant: float = math.inf
        self._make_gate = make_gate
        self._draw = random.Random(seed)  # noqa: S311 - spreads load, guards nothing
        # Of the smallest replica: its pages, their tokens, and the streams that it decodes at once.
        self._nominal = (_STREAM_TOKENS, 1, 1)
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._known_by: dict[int, set[str]] = {}  # first blocks, and where they may be known

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
        speed = EngineSpeed(prefill_tokens_s=1 / self.speed.prefill_token_s, step_s=self.speed.step_s)
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
            for where in self._known_by.values():
                where.discard(site_id)
            self.apart = len({known.region for known in self.sites.values()}) > 1
            self._measure()

    def join_half(
        self, half_id: str, total_tokens: int, *, tokens_ahead_max: int, takes: Callable[[int, int], bool]
    ) -> PrefillHalf:
        """A prefill half with this pool. Which sites it computes prompts for is said there."""
        half = self.halves.get(half_id)
        if half is None:
            speed = EngineSpeed(prefill_tokens_s=1 / self.speed.prefill_token_s, step_s=self.speed.step_s)
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
        gates = (site.gate for site in self.sites.values())
        gate = min(gates, key=lambda gate: gate.total_tokens, default=None)
        self._nominal = (_STREAM_TOKENS, 1, 1)
        if gate is not None:
            streams = max(1, min(gate.limits.running_max, gate.total_tokens // _STREAM_TOKENS))
            self._nominal = (max(1, gate.total_tokens // gate.page_tokens), gate.page_tokens, streams)

    def reported(self, site_id: str, report: EngineReport, now: float) -> None:
        self.sites[site_id].gate.reported(report, now)

    # Decisions

    def expect(self, want: Want) -> Expected:
        """What it will take, at the replica that has most of its prompt."""
        best = NOTHING_KNOWN
        for _, known in self._near(want):
            if known.cached_tokens > best.cached_tokens:
                best = known
        for half in self.halves.values() if want.blocks else ():
            known = half.prefixes.known(want.blocks, want.prompt_tokens)
            if half.open and known.cached_tokens > best.cached_tokens:
                best = known
        uncached = want.prompt_tokens - self._cached(best)
        cost_s = self._cost_s(want, uncached=uncached, produced=self._typical(want))
        attended = uncached * (want.prompt_tokens - uncached / 2)
        first_s = self.speed.prefill_s(uncached, attended) + self.speed.step_s
        return Expected(cost_s, first_s, 1 - uncached / want.prompt_tokens)

    def will_hold(self, want: Want) -> int:
        """Tokens that it will hold at its end, if its choices become as long as such requests' typically do."""
        return want.choices * (want.prompt_tokens + self._typical(want))

    def place(
        self, want: Want, now: float, *, charged_s: float, beyond: Mapping[str, float] = _NOBODY
    ) -> Placed | None:
        """It enters where it fits, or nowhere: then `ask_again_s` says when the answer may be another by itself, and
        `waits_in` where that is.

        beyond: regions in which others wait that go before it, and the seconds to the last one's first token there.
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
        return self._need(want, site, self._lengths(want), NOTHING_KNOWN)

    def _fits(self, want: Want, now: float, beyond: Mapping[str, float] = _NOBODY) -> _Found | None:
        self.ask_again_s = math.inf
        self.waits_in = None
        self.waits_for_prefill = False
        near = self._near(want)
        if not want.revision:
            anywhere = [site for site in self.sites.values() if site.open]
            sites = anywhere if want.regions is None else list(self._open_to(want))
            return self._fits_in(want, now, sites, near, beyond)
        own = [site for site in self._open_to(want) if site.revision == want.revision]
        found = self._fits_in(want, now, own, near, beyond)
        if found is not None or (own and not want.elsewhere):
            return found
        # A revision that is down or asleep takes no share.
        self.waits_in = None
        others = [site for site in self._open_to(want) if site.revision != want.revision]
        return self._fits_in(want, now, others, near, beyond)

    def _fits_in(
        self, want: Want, now: float, sites: list[Site], near: list[tuple[Site, Known]], beyond: Mapping[str, float]
    ) -> _Found | None:
        """At one of these, which are open."""
        if want.revision:
            near = [(site, known) for site, known in near if site in sites]
        if self.apart or want.regions is not None:
            return self._fits_somewhere(want, now, sites, near, beyond)
        return self._fits_among(want, now, sites, near)[0]

    def _some_of(self, sites: list[Site]) -> list[Site]:
        """The replicas to be asked first, the emptiest first: all, or of very many a random part.

        So gateways that see the same reports do not all go to the same replica.
        """
        return by_load(self._draw.sample(sites, _ASKED_AT_FIRST) if len(sites) > _ASKED_AT_FIRST else sites)

    def _open_to(self, want: Want) -> Iterable[Site]:
        """Nothing else is asked of the others, whatever the request and however full these are."""
        return (site for site in self.sites.values() if site.open and allows(want.regions, site.region))

    def _fits_somewhere(
        self, want: Want, now: float, sites: list[Site], near: list[tuple[Site, Known]], beyond: Mapping[str, float]
    ) -> _Found | None:
        """In the region where its first token comes soonest, if it fits there now."""
        there: dict[str, list[Site]] = {}
        for site in sites:
            there.setdefault(site.region, []).append(site)
        known = {site.region: [pair for pair in near if pair[0].region == site.region] for site, _ in near}

        def own_s(region: str) -> float:
            """To the first token at its emptiest replica, if nothing of it is known there."""
            return self._first_s(min(there[region], key=LOAD), want, NOTHING_KNOWN)

        def ask(region: str) -> tuple[_Found | None, float]:
            return self._fits_among(want, now, there[region], known.get(region, []))

        away_s = {region: sites[0].away_s for region, sites in there.items()}
        turn_s = {
            region: beyond[region] + own_s(region) / len(there[region]) for region in there.keys() & beyond.keys()
        }
        choice = choose(away_s, ask, own_s=own_s, known=known.keys(), turn_s=turn_s)
        if choice.found is None:
            self.waits_in = choice.waits_in(want.regions)
            if self.waits_in is not None:
                # By then it has started, or that was foreseen wrongly.
                self.ask_again_s = min(self.ask_again_s, *self.waits_in.values())
        return choice.found

    def _fits_among(
        self, want: Want, now: float, sites: list[Site], near: list[tuple[Site, Known]]
    ) -> tuple[_Found | None, float]:
        """As `_fits_at`: a random part of very many sites is asked first."""
        found, in_s = self._fits_at(want, now, self._some_of(sites), near)
        if found is None and len(sites) > _ASKED_AT_FIRST:
            return self._fits_at(want, now, by_load(sites), near)
        return found, in_s

    def _fits_at(
        self, want: Want, now: float, sites: list[Site], near: list[tuple[Site, Known]]
    ) -> tuple[_Found | None, float]:
        """The replica that takes it, and the seconds to its first token there, or if none does at one of the emptiest.
        They are worked out only where regions are compared.
        """
        if self.ramping:
            bound = self._ramped_load(want)
            sites = [site for site in sites if site.share >= 1 or site.load < site.share * bound or not len(site.gate)]
        sites, known_at = self._order(want, sites, near)
        lengths = self._lengths(want)
        plain: dict[bool, Need] = {}  # by whether another engine computes its prompt
        asked, prompt_tokens, in_s = 0, want.prompt_tokens * want.choices, math.inf
        quotes: dict[tuple[PrefillHalf, ...], Quote | None] = {}  # sites of one group have the same halves
        self.waits_for_prefill = any(site.halves is not None for site in sites)
        for site in sites:
            if site.on_trial and len(site.gate):
                continue
            quote: Quote | None = None
            if site.halves is not None:
                if site.halves not in quotes:
                    quotes[site.halves] = self._quote(want, site.halves)
                quote = quotes[site.halves]
                if quote is None:
                    continue  # no prompt is computed for which decode would have no room, nor the other way round
            self.waits_for_prefill = False
            known = known_at.get(site.id) if known_at else None
            if known is not None:
                need = self._need(want, site, lengths, known)
            elif prompt_tokens > site.gate.free_tokens and len(site.gate):
                continue  # the least that must be free is not: nothing else need be asked
            elif (apart := quote is not None) in plain and plain[apart].prompt_tokens <= site.gate.total_tokens:
                need = plain[apart]
            else:
                need = plain[apart] = self._need(want, site, lengths, NOTHING_KNOWN)
            entry = site.gate.entry(need, now)
            prompt_s = 0.0 if quote is None else quote.in_s
            if entry is Entry.NOW:
                found = _Found(site, need, known or NOTHING_KNOWN if quote is None else quote.known, quote)
                return found, site.gate.first_token_s(need) + prompt_s if self.apart else 0.0
            if (entry is Entry.BETWEEN or entry is Entry.PREFILL) and asked < _FORESEEN_SITES_MAX:
                asked += 1  # the emptiest come first: one of them will say yes first
                clears_s = site.gate.clears_in_s(entry, need, now)
                self.ask_again_s = min(self.ask_again_s, clears_s)
                # The prefills under way are in its first token's time already.
                waits_s = clears_s if entry is Entry.BETWEEN else 0.0
                in_s = min(in_s, site.gate.first_token_s(need) + prompt_s + waits_s)
        return None, in_s if in_s < math.inf or not self.apart else self._room_s(want, sites, lengths, now)

    def _room_s(self, want: Want, sites: list[Site], lengths: LengthDistribution, now: float) -> float:
        """Seconds to its first token at the emptiest, which has no pages for it now; inf: nobody foresees it."""
        if not sites:
            return math.inf
        need = self._need(want, sites[0], lengths, NOTHING_KNOWN)
        room_s = sites[0].gate.room_in_s(need, now, probability=_FORESEEN_PROBABILITY)
        if room_s is None:
            return math.inf
        return room_s + sites[0].gate.first_token_s(need) + self._prompt_s(want, sites[0])

    def _quote(self, want: Want, halves: tuple[PrefillHalf, ...]) -> Quote | None:
        """The prefill half that takes its prompt, if one does."""
        return choose_half(halves, self._prompt(want), delay_s_max=self.limits.affinity_s_max)

    def _prompt(self, want: Want) -> Prompt:
        last_at = self._sessions.get((want.tenant, want.session), "") if want.session else ""
        return Prompt(want.prompt_tokens, want.choices, want.blocks, last_at, self.trust.share)

    def _prompt_s(self, want: Want, site: Site) -> float:
        """Until the soonest of its halves has computed the prompt, whether or not it would take it now; 0 where the
        site does that itself.
        """
        if site.halves is None:
            return 0.0
        prompt = self._prompt(want)
        return min((half.quote(prompt).in_s for half in site.halves), default=0.0)

    def _ramped_load(self, want: Want) -> float:
        """What replicas carry that have not just come back, on average; inf where there are none for it."""
        loads = [site.load for site in self._open_to(want) if site.share >= 1]
        return sum(loads) / len(loads) if loads else math.inf

    def verdicts(self, want: Want, now: float) -> dict[str, Entry]:
        """What each replica would say now, for explanations."""
        lengths = self._lengths(want)
        return {
            site.id: site.gate.entry(self._need(want, site, lengths, NOTHING_KNOWN), now)
            for site in self._open_to(want)
        }

    def room_in_s(self, want: Want, now: float, *, probability: float) -> float | None:
        """Seconds until one of the emptiest replicas has its prompt's pages; None if nobody foresees it."""
        lengths = self._lengths(want)
        foreseen = []
        for site in by_load(self._open_to(want))[:_FORESEEN_SITES_MAX]:
            need = self._need(want, site, lengths, NOTHING_KNOWN)
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
        want = placed.want
        self.lengths.observe(self._key(want), end.produced)
        self.coverage.ended(request_id, end.produced)
        if end.produced:
            self.trust.observe(expected=placed.known.cached_tokens, cached=want.prompt_tokens - end.uncached)
            self._learn_speed(placed, end)
        taken_s = self._cost_s(want, uncached=end.uncached, produced=end.produced) if end.produced else 0.0
        return taken_s - placed.charged_s

    def retracted(self, site_id: str) -> frozenset[str]:
        """The engine has taken pages back from requests. Whose requests ran past what was forecast is planned with more
        carefully from now on, also what it has running anywhere. Those tenants.
        """
        beyond: dict[str, int] = {}
        for need, _, produced in self.sites[site_id].gate.known_running():
            want = self.inside[need.id].want
            unforeseen = max(0, produced - self._learned(want).quantile(_FORESEEN_LENGTHS)) * need.choices
            beyond[want.tenant] = beyond.get(want.tenant, 0) + unforeseen
        blamed = self.doubt.retracted(beyond)
        for request_id, placed in self.inside.items() if blamed else ():
            if placed.want.tenant in blamed:
                placed.site.gate.recast(request_id, self._lengths(placed.want))
        return blamed

    def observe_prefill(self, site: Site | PrefillHalf, tokens: int, attended: float, seconds: float) -> None:
        site.speed.observe_prefill(tokens, attended, seconds)
        self.speed.observe_prefill(tokens, attended, seconds)

    def observe_step(self, site: Site, seconds: float) -> None:
        site.speed.observe_step(seconds)
        self.speed.observe_step(seconds)

    # Inside

    def _order(
        self, want: Want, sites: list[Site], near: list[tuple[Site, Known]]
    ) -> tuple[list[Site], dict[str, Known]]:
        if len(sites) < 2 or not near:
            return sites, {site.id: known for site, known in near}
        best_s = self._first_s(sites[0], want, NOTHING_KNOWN)
        timed = [(site, self._first_s(site, want, known)) for site, known in near]
        ordered = with_affinity(timed, sites, best_s, delay_s_max=self.limits.affinity_s_max)
        return ordered, {site.id: known for site, known in near}

    def _near(self, want: Want) -> list[tuple[Site, Known]]:
        """Replicas open to it that have something of it: its prefix, or its session."""
        names = set(self._known_by.get(want.blocks[0], ())) if want.blocks else set()
        if want.session:
            last = self._sessions.get((want.tenant, want.session))
            names |= {last} if last else set()
        near = []
        for name in sorted(names):
            site = self.sites.get(name)
            if site is not None and site.open and allows(want.regions, site.region):
                near.append((site, site.prefixes.known(want.blocks, want.prompt_tokens)))
        return near

    def _first_s(self, site: Site, want: Want, known: Known) -> float:
        if site.halves is not None:
            return self._prompt_s(want, site) + site.speed.step_s
        uncached = want.prompt_tokens - self._cached(known)
        attended = uncached * (want.prompt_tokens - uncached / 2)
        gate = site.gate
        return gate.prefilling_s() + site.speed.prefill_s(uncached, attended) + site.speed.step_s

    def _cached(self, known: Known) -> int:
        return int(known.cached_tokens * self.trust.share)

    def _need(self, want: Want, site: Site, lengths: LengthDistribution, known: Known) -> Need:
        # Choices that could not all stand side by side run one after another: together they need the whole pool.
        prompt = min(want.prompt_tokens * want.choices, site.gate.total_tokens)
        # Of what another engine computes nothing is computed here, and nothing that it sends is shared here.
        apart = site.halves is not None
        uncached = 0 if apart else prompt - (self._cached(known) if want.choices == 1 else 0)
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
            if want.blocks:
                self._note_first_block(want.blocks[0], site.id)
        if want.session:
            self._sessions[want.tenant, want.session] = site.id if quote is None else quote.half.id
            self._sessions.move_to_end((want.tenant, want.session))
            if len(self._sessions) > self.limits.sessions_max:
                self._sessions.popitem(last=False)
        self.inside[want.request_id] = placed
        if site.premises is not None:
            site.premises.take(want, placed.entered_at, "" if quote is None else quote.half.id)
        return placed

    def _note_first_block(self, block: int, site_id: str) -> None:
        self._known_by.setdefault(block, set()).add(site_id)
        # Bounded as the engines' caches are: who has forgotten the block is asked in vain once, and then not again.
        if len(self._known_by) > 65_536:
            del self._known_by[next(iter(self._known_by))]

    def _lengths(self, want: Want) -> LengthDistribution:
        """As believed, with what doubt there is of its tenant."""
        parts = self.doubt.of(want.tenant)
        return doubted(self._learned(want), parts / PARTS) if parts else self._learned(want)

    def _learned(self, want: Want) -> LengthDistribution:
        """Learned; before there is history, what is held ahead of a stream, and then as long again."""
        key = self._key(want)
        if self.lengths.has_history(key):
            return self.lengths.distribution(key, ceiling=want.cap_tokens)
        return expected_about(min(want.cap_tokens, self.limits.outputs_ahead), ceiling=want.cap_tokens)

    def _typical(self, want: Want) -> int:
        return self.lengths.typical(self._key(want), ceiling=want.cap_tokens)

    @staticmethod
    def _key(want: Want) -> LengthKey:
        return _length_key(want.tenant, want.endpoint, want.cap_tokens)

    def _learn_speed(self, placed: Placed, end: Ended) -> None:
        attended = end.uncached * (placed.want.prompt_tokens - end.uncached / 2)
        if end.first_s is not None:
            where = placed.site if placed.quote is None else placed.quote.half
            self.observe_prefill(where, end.uncached, attended, end.first_s)
        if end.between_s is not None:
            self.observe_step(placed.site, end.between_s)
        elif end.first_s is None and end.whole_s is not None and end.produced >= _STEPS_WORTH_LEARNING:
            self.observe_step(placed.site, max(0.0, end.whole_s - placed.first_s) / end.produced)

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


@lru_cache(4096)
def _length_key(tenant: str, endpoint: str, cap_tokens: int) -> LengthKey:
    return LengthKey("", tenant, endpoint, bucket_of(cap_tokens))
