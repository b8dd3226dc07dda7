"""Where does a request fit now, or what does it wait for? One search over the replicas of its model.

placing.py makes one for each decision and takes what it finds; nothing is changed here. Gates (gate.py) are asked in
the order of routing.py, and of several regions the one where the first token comes soonest (regions.py).
"""

import math
import random
from collections.abc import Mapping
from typing import Protocol

from gateway.experience import Experience
from gateway.forecast import attended_by
from gateway.gate import Entry
from gateway.need import Need
from gateway.prefill_half import PrefillHalf, Prompt, Quote
from gateway.prefill_half import choose as choose_half
from gateway.prefixes import NOTHING_KNOWN, Known
from gateway.regions import choose
from gateway.routing import LOAD, by_load, with_affinity
from gateway.site import Site, open_to
from gateway.want import Want
from gateway.whereabouts import Whereabouts
from tenancy.values import value

# Of more replicas than this so many are asked first, drawn anew for each request.
_ASKED_AT_FIRST = 64
# So many replicas, the emptiest, are asked when they will have room.
FORESEEN_SITES_MAX = 4
# A local start is foreseen by the median: later than that it is as often as sooner.
_FORESEEN_PROBABILITY = 0.5


class Grounds(Protocol):
    """What a search goes by, of one model.

    apart: its replicas are in several regions; with one nothing is spent on the question. ramping: one of them has just
    come back. affinity_s_max: seconds that a cached prefix or a session may delay the first token over the best
    replica. draw: spreads load.
    """

    sites: dict[str, Site]
    experience: Experience
    whereabouts: Whereabouts
    apart: bool
    ramping: bool
    draw: random.Random

    @property
    def affinity_s_max(self) -> float: ...


@value
class Found:
    """Where it fits. known: of its prompt there. quote: of the prefill half that computes its prompt; None where its
    replica does.
    """

    site: Site
    need: Need
    known: Known
    quote: Quote | None = None


class Search:
    """beyond: regions in which others wait that go before it, and the seconds to the last one's first token there.

    After `find` found nothing: ask_again_s: seconds until the answer may be another by itself. waits_in: where it
    waits, and the seconds to its first token there; None: anywhere. waits_for_prefill: it was a prefill half that was
    missing, and not pages of those that decode.
    """

    def __init__(self, grounds: Grounds, want: Want, now: float, beyond: Mapping[str, float]) -> None:
        self.ask_again_s = math.inf
        self.waits_in: Mapping[str, float] | None = None
        self.waits_for_prefill = False
        self._grounds = grounds
        self._want = want
        self._now = now
        self._beyond = beyond
        self._experience = grounds.experience
        self._lengths = grounds.experience.lengths_of(want)
        self._near = grounds.whereabouts.near(want, grounds.sites)
        self._quotes: dict[tuple[PrefillHalf, ...], Quote | None] = {}  # sites of one group have the same halves

    def find(self) -> Found | None:
        want = self._want
        sites = open_to(want, self._grounds.sites.values())
        if not want.revision:
            return self._find_in(sites, self._near)
        own = [site for site in sites if site.revision == want.revision]
        found = self._find_in(own, [(site, known) for site, known in self._near if site in own])
        if found is not None or (own and not want.elsewhere):
            return found
        # A revision that is down or asleep takes no share.
        self.waits_in = None
        others = [site for site in sites if site.revision != want.revision]
        return self._find_in(others, [(site, known) for site, known in self._near if site in others])

    def _find_in(self, sites: list[Site], near: list[tuple[Site, Known]]) -> Found | None:
        """At one of these. near: those of them that have something of it."""
        if self._grounds.apart or self._want.regions is not None:
            return self._find_somewhere(sites, near)
        return self._find_among(sites, near)[0]

    def _find_somewhere(self, sites: list[Site], near: list[tuple[Site, Known]]) -> Found | None:
        """In the region where its first token comes soonest, if it fits there now."""
        there: dict[str, list[Site]] = {}
        for site in sites:
            there.setdefault(site.region, []).append(site)
        known = {site.region: [pair for pair in near if pair[0].region == site.region] for site, _ in near}

        def own_s(region: str) -> float:
            """To the first token at its emptiest replica, if nothing of it is known there."""
            return self._first_s(min(there[region], key=LOAD), NOTHING_KNOWN)

        def ask(region: str) -> tuple[Found | None, float]:
            return self._find_among(there[region], known.get(region, []))

        away_s = {region: sites[0].away_s for region, sites in there.items()}
        turn_s = {
            region: self._beyond[region] + own_s(region) / len(there[region])
            for region in there.keys() & self._beyond.keys()
        }
        choice = choose(away_s, ask, own_s=own_s, known=known.keys(), turn_s=turn_s)
        if choice.found is None:
            self.waits_in = choice.waits_in(self._want.regions)
            if self.waits_in is not None:
                # By then it has started, or that was foreseen wrongly.
                self.ask_again_s = min(self.ask_again_s, *self.waits_in.values())
        return choice.found

    def _find_among(self, sites: list[Site], near: list[tuple[Site, Known]]) -> tuple[Found | None, float]:
        """As `_find_at`: of very many sites a random part is asked first, so that gateways that see the same reports do
        not all go to the same replica.
        """
        if len(sites) > _ASKED_AT_FIRST:
            found, in_s = self._find_at(by_load(self._grounds.draw.sample(sites, _ASKED_AT_FIRST)), near)
            if found is not None:
                return found, in_s
        return self._find_at(by_load(sites), near)

    def _find_at(self, sites: list[Site], near: list[tuple[Site, Known]]) -> tuple[Found | None, float]:
        """The replica that takes it, and the seconds to its first token there, or if none does at one of the emptiest.
        They are worked out only where regions are compared. sites: the emptiest first.
        """
        want, now, apart = self._want, self._now, self._grounds.apart
        if self._grounds.ramping:
            bound = self._ramped_load()
            sites = [site for site in sites if site.share >= 1 or site.load < site.share * bound or not len(site.gate)]
        known_at = {site.id: known for site, known in near}
        sites = self._order(sites, near)
        plain: dict[bool, Need] = {}  # by whether another engine computes its prompt
        asked, prompt_tokens, in_s = 0, want.prompt_tokens * want.choices, math.inf
        self.waits_for_prefill = any(site.halves is not None for site in sites)
        for site in sites:
            if site.on_trial and len(site.gate):
                continue
            quote = None if site.halves is None else self._quote(site.halves)
            if site.halves is not None and quote is None:
                continue  # no prompt is computed for which decode would have no room, nor the other way round
            self.waits_for_prefill = False
            known = known_at.get(site.id) if known_at else None
            if known is not None:
                need = self._need(site, known)
            elif prompt_tokens > site.gate.free_tokens and len(site.gate):
                continue  # the least that must be free is not: nothing else need be asked
            elif (halved := quote is not None) in plain and plain[halved].prompt_tokens <= site.gate.total_tokens:
                need = plain[halved]
            else:
                need = plain[halved] = self._need(site, NOTHING_KNOWN)
            entry = site.gate.entry(need, now)
            prompt_s = 0.0 if quote is None else quote.in_s
            if entry is Entry.NOW:
                found = Found(site, need, known or NOTHING_KNOWN if quote is None else quote.known, quote)
                return found, site.gate.first_token_s(need) + prompt_s if apart else 0.0
            if (entry is Entry.BETWEEN or entry is Entry.PREFILL) and asked < FORESEEN_SITES_MAX:
                asked += 1  # the emptiest come first: one of them will say yes first
                clears_s = site.gate.clears_in_s(entry, need, now)
                self.ask_again_s = min(self.ask_again_s, clears_s)
                # The prefills under way are in its first token's time already.
                waits_s = clears_s if entry is Entry.BETWEEN else 0.0
                in_s = min(in_s, site.gate.first_token_s(need) + prompt_s + waits_s)
        return None, in_s if in_s < math.inf or not apart else self._room_s(sites)

    def _order(self, sites: list[Site], near: list[tuple[Site, Known]]) -> list[Site]:
        if len(sites) < 2 or not near:
            return sites
        best_s = self._first_s(sites[0], NOTHING_KNOWN)
        timed = [(site, self._first_s(site, known)) for site, known in near]
        return with_affinity(timed, sites, best_s, delay_s_max=self._grounds.affinity_s_max)

    def _ramped_load(self) -> float:
        """What replicas carry that have not just come back, on average; inf where there are none for it."""
        loads = [site.load for site in open_to(self._want, self._grounds.sites.values()) if site.share >= 1]
        return sum(loads) / len(loads) if loads else math.inf

    def _need(self, site: Site, known: Known) -> Need:
        return self._experience.need(self._want, site, self._lengths, known)

    # When it would have its first token

    def _first_s(self, site: Site, known: Known) -> float:
        if site.halves is not None:
            return self._prompt_s(site) + site.speed.step_s
        tokens = self._want.prompt_tokens
        uncached = tokens - self._experience.cached(known)
        own_s = site.speed.prefill_s(uncached, attended_by(uncached, tokens))
        return site.gate.prefilling_s() + own_s + site.speed.step_s

    def _room_s(self, sites: list[Site]) -> float:
        """Seconds to its first token at the emptiest, which has no pages for it now; inf: nobody foresees it."""
        if not sites:
            return math.inf
        need = self._need(sites[0], NOTHING_KNOWN)
        room_s = sites[0].gate.room_in_s(need, self._now, probability=_FORESEEN_PROBABILITY)
        if room_s is None:
            return math.inf
        return room_s + sites[0].gate.first_token_s(need) + self._prompt_s(sites[0])

    def _quote(self, halves: tuple[PrefillHalf, ...]) -> Quote | None:
        """The prefill half that takes its prompt, if one does."""
        if halves not in self._quotes:
            self._quotes[halves] = choose_half(halves, self._prompt(), delay_s_max=self._grounds.affinity_s_max)
        return self._quotes[halves]

    def _prompt_s(self, site: Site) -> float:
        """Until the soonest of its halves has computed the prompt, whether or not it would take it now; 0 where the
        site does that itself.
        """
        if site.halves is None:
            return 0.0
        prompt = self._prompt()
        return min((half.quote(prompt).in_s for half in site.halves), default=0.0)

    def _prompt(self) -> Prompt:
        want = self._want
        last_at = self._grounds.whereabouts.last_at(want)
        return Prompt(want.prompt_tokens, want.choices, want.blocks, last_at, self._experience.trust.share)
