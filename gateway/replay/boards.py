"""The board of a simulated fleet: its gateways claim pages as the service's do, one claim after the other.

A gateway asks for what has changed since its last round, at once when somebody waits and every so often else. The board
judges each claim when it is made, and the gateway knows the grant a trip later; where others wait it hears by its
heartbeats. All who wait are of one account: whose turn it is among the gateways is not played. Used by fleets.py alone.
Pure.
"""

import heapq
import math
from collections.abc import Callable, Sequence

from gateway.placing import Placing
from gateway.sharing.claims import Ask, ask_of, granted, take
from gateway.sharing.sharer import BEAT_S_MAX, BUSY_S, IDLE_S

# So long the board knows that somebody waits (functions.lua).
_HUNGER_S = 1.0


class SimulatedBoard:
    """gateways: those that share; what has the same name is the same replica. trip_s: a claim's way and its grant's.

    waiting: does somebody wait at a gateway? eased: told when a gateway may plan with more.
    """

    def __init__(
        self,
        gateways: Sequence[Placing],
        *,
        trip_s: float,
        waiting: Callable[[int], bool],
        eased: Callable[[int], None],
    ) -> None:
        self._gateways = gateways
        self._trip_s = trip_s
        self._waiting = waiting
        self._eased = eased
        self._claims: dict[tuple[int, str], int] = {}
        self._claimed: dict[str, int] = {}  # of each replica, by all
        self._changed = [set(placing.sites) for placing in gateways]
        self._left: list[list[str]] = [[] for _ in gateways]  # of a round under way, the last first
        self._hungry: set[int] = set()
        self._hunger: dict[str, dict[int, float]] = {}  # of each replica: which gateways wait for it, and until when
        self._heard: list[frozenset[str]] = [frozenset() for _ in gateways]  # where others wait, by the last beat
        self._beat_at = [-math.inf] * len(gateways)
        self._due: list[tuple[float, int, int, str, Ask | None]] = []  # without an ask: a round begins or goes on
        self._rounds_at = [math.inf] * len(gateways)  # other entries of the heap are void
        for number, placing in enumerate(gateways):
            for site in placing.sites.values():
                site.gate.granted_tokens = 0.0
            self._round_at(IDLE_S * number / len(gateways), number)

    @property
    def next_at(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def changed(self, gateway: int, site: str) -> None:
        """A request has entered there or left."""
        self._changed[gateway].add(site)

    def waits(self, gateway: int, now: float) -> None:
        """Somebody finds no room by what is granted."""
        self._changed[gateway].update(
            name for name, site in self._gateways[gateway].sites.items() if site.gate.short_of > 0
        )
        self._hungry.add(gateway)
        if not self._left[gateway] and self._rounds_at[gateway] > now:
            self._round_at(now, gateway)

    def step(self) -> None:
        """What is due next happens."""
        at, _, gateway, site, ask = heapq.heappop(self._due)
        if ask is not None:
            self._changed[gateway].add(site)  # what is no more short of anything may give some back
            gate, tokens = self._gateways[gateway].sites[site].gate, self._claims[gateway, site]
            if take(gate, ask, tokens, waits=self._waiting(gateway)):
                self._eased(gateway)
        elif at == self._rounds_at[gateway]:
            self._go_on(gateway, at)

    def _go_on(self, gateway: int, now: float) -> None:
        """The next claim of a round, or after the last one the next round."""
        sites, left = self._gateways[gateway].sites, self._left[gateway]
        if now - self._beat_at[gateway] >= BEAT_S_MAX:
            self._beat(gateway, now)
        if not left:
            left += sorted(self._changed[gateway], reverse=True)
            self._changed[gateway].clear()
        while left:
            site = left.pop()
            gate = sites[site].gate
            heard = self._heard[gateway]
            ask = ask_of(gate, processes=len(self._gateways), others_hunger=site in heard)
            if ask is not None:
                self._claim(gateway, site, ask, gate.total_tokens, now)
                self._push(now + self._trip_s, gateway, site, ask)
                self._round_at(now + self._trip_s, gateway)
                return
        pause_s = BUSY_S if gateway in self._hungry else IDLE_S
        self._hungry.discard(gateway)
        self._round_at(now + pause_s, gateway)

    def _beat(self, gateway: int, now: float) -> None:
        self._beat_at[gateway] = now
        heard = frozenset(
            site
            for site, until in self._hunger.items()
            if any(end > now for other, end in until.items() if other != gateway)
        )
        self._changed[gateway] |= heard - self._heard[gateway]
        self._heard[gateway] = heard

    def _claim(self, gateway: int, site: str, ask: Ask, total: int, now: float) -> None:
        waits = self._hunger.setdefault(site, {})
        waits.pop(gateway, None)
        if ask.short:
            waits[gateway] = now + _HUNGER_S
        others = self._claimed.get(site, 0) - self._claims.get((gateway, site), 0)
        tokens = self._claims[gateway, site] = granted(ask.least, ask.wanted, total=total, others=others)
        self._claimed[site] = others + tokens

    def _round_at(self, at: float, gateway: int) -> None:
        self._rounds_at[gateway] = at
        self._push(at, gateway)

    def _push(self, at: float, gateway: int, site: str = "", ask: Ask | None = None) -> None:
        # What is due at the same time happens in the order of the gateways, a grant before the claim after it.
        heapq.heappush(self._due, (at, -1 if ask else gateway, gateway, site, ask))
