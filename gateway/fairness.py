"""Whose turn is it? Weighted dominant-resource fair queueing over per-tenant queues in strict tiers.

Waiting requests are kept here and taken out one by one; whether the chosen one fits is not known here, nor clocks or
engines. A tenant's counter is the service it has had: for each request the seconds of a whole replica that its dominant
resource took, over the tenant's weight. The least counter is next (DRFQ, SIGCOMM 2012; VTC, OSDI 2024, is its
one-resource case).
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, TypeVar

from tenancy.values import value

Item = TypeVar("Item")

# Tenants whose charges are kept for other gateways.
_CHARGES_MAX = 10_000


def dominant_seconds(*, prefill_s: float, decode_s: float, pages_s: float) -> float:
    """Seconds of the whole replica in the resource that a request takes most of.

    Each: what it takes of one, over what the replica gives of it in a second. pages_s: of pages × steps × the nominal
    step time. The nominal time, not the measured one: a neighbour that slows the engine down is not charged to this
    tenant.
    """
    return max(prefill_s, decode_s, pages_s)


@value
class Entry(Generic[Item]):
    """A waiting request. cost_s: its expected dominant seconds. cached: the part of its prompt expected in cache.

    kept: it has come again when it was told to.
    """

    id: str
    tenant: str
    tier: int
    cost_s: float
    tokens: int
    item: Item
    weight: float = 1.0
    cached: float = 0.0
    kept: bool = False


@dataclass(slots=True)
class _Queue(Generic[Item]):
    entries: "OrderedDict[str, Entry[Item]]" = field(default_factory=OrderedDict)
    tokens: int = 0
    cost_s: float = 0.0


@dataclass(slots=True)
class _Tier(Generic[Item]):
    """One tier: its busy tenants' queues, everybody's counters, and where the virtual time is."""

    queues: dict[str, _Queue[Item]] = field(default_factory=dict)
    counters: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    floor: float = 0.0  # the least counter when somebody was last served
    kept: dict[str, int] = field(default_factory=dict)  # tenants with kept requests, and how many


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Entries and prompt tokens that may wait: of one tenant, and in all; and tenants remembered while idle."""

    entries_max: int
    tokens_max: int
    tenant_entries_max: int
    tenant_tokens_max: int
    idle_tenants_max: int = 1024


class FairQueue(Generic[Item]):
    """The waiting requests of one model.

    cached_ahead_s: how much service a tenant whose request is mostly cached may be ahead of the least served and still
    go first. It bounds what a cached prefix can take from others. kept_ahead_s: the same of a request that has come
    again when it was told to: it is served soon, and what its tenant took early it waits for later.
    """

    def __init__(self, bounds: QueueBounds, *, cached_ahead_s: float = 0.0, kept_ahead_s: float = 0.0) -> None:
        self._bounds = bounds
        self._cached_ahead_s = cached_ahead_s
        self._kept_ahead_s = kept_ahead_s
        self._tiers: dict[int, _Tier[Item]] = {}
        self._charges: dict[str, float] = {}  # weighted seconds since they were last taken
        self._order: list[int] = []  # tiers, most urgent (smallest) first
        self._where: dict[str, tuple[int, str]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._where

    def __iter__(self) -> Iterator[Entry[Item]]:
        """All entries, by tier and tenant, in no order of turns."""
        for number in self._order:
            for queue in self._tiers[number].queues.values():
                yield from queue.entries.values()

    def has_room(self, tenant: str, tier: int, tokens: int, *, kept: bool = False) -> bool:
        """May one more wait? A single request larger than the bound on tokens may, if it is alone.

        kept: its place was promised; a quarter of the bound on entries is there for such ones beside all others.
        """
        bounds = self._bounds
        if kept:
            return len(self) < bounds.entries_max + bounds.entries_max // 4
        if len(self) >= bounds.entries_max or (len(self) > 0 and self._tokens + tokens > bounds.tokens_max):
            return False
        queue = self._tiers[tier].queues.get(tenant) if tier in self._tiers else None
        if queue is None:
            return True
        return len(queue.entries) < bounds.tenant_entries_max and queue.tokens + tokens <= bounds.tenant_tokens_max

    def push(self, entry: Entry[Item], *, first: bool = False) -> None:
        """Wait behind the tenant's own, or before them. Nobody else's turn changes by that.

        A tenant that becomes busy starts no lower than the least served busy one.
        """
        assert entry.id not in self._where, "a request waits once"
        tier = self._tier(entry.tier)
        queue = tier.queues.get(entry.tenant)
        if queue is None:
            queue = tier.queues[entry.tenant] = _Queue()
            tier.counters[entry.tenant] = max(tier.counters.get(entry.tenant, 0.0), tier.floor)
        queue.entries[entry.id] = entry
        if first:
            queue.entries.move_to_end(entry.id, last=False)
        if entry.kept:
            tier.kept[entry.tenant] = tier.kept.get(entry.tenant, 0) + 1
        queue.tokens += entry.tokens
        queue.cost_s += entry.cost_s
        self._tokens += entry.tokens
        self._where[entry.id] = (entry.tier, entry.tenant)

    def head(self) -> Entry[Item] | None:
        """Who is next. Not overtaken if it does not fit: a large request would starve."""
        for number in self._order:
            tier = self._tiers[number]
            if not tier.queues:
                continue
            least = min(tier.queues, key=tier.counters.__getitem__)
            entry = _first(tier.queues[least])
            if tier.kept and not entry.kept:
                bound = tier.counters[least] + self._kept_ahead_s
                early = [name for name in tier.kept if tier.counters[name] <= bound and _first(tier.queues[name]).kept]
                if early:
                    return _first(tier.queues[min(early, key=tier.counters.__getitem__)])
            if self._cached_ahead_s > 0:
                bound = tier.counters[least] + self._cached_ahead_s
                for tenant, queue in tier.queues.items():
                    rival = _first(queue)
                    if tier.counters[tenant] <= bound and rival.cached > max(0.5, entry.cached):
                        entry = rival
            return entry
        return None

    def behind(self, head: Entry[Item]) -> Iterator[Entry[Item]]:
        """Who would be next if those before can't be served: by tiers everybody's first, in the order of what tenants
        were served, then everybody's second, and so on.
        """
        for number in self._order:
            tier = self._tiers[number]
            tenants = sorted(tier.queues, key=tier.counters.__getitem__)
            for abreast in zip_longest(*(list(tier.queues[name].entries.values()) for name in tenants)):
                yield from (entry for entry in abreast if entry is not None and entry is not head)

    def serve(self, entry: Entry[Item]) -> None:
        """It enters: it leaves the queue and its tenant is charged the expected cost (`correct` settles the rest)."""
        tier = self._tiers[entry.tier]
        tier.floor = max(tier.floor, min(tier.counters[tenant] for tenant in tier.queues))
        self.remove(entry.id)
        self._charge(tier, entry.tenant, entry.cost_s / entry.weight)

    def pass_by(self, tenant: str, tier: int, cost_s: float, *, weight: float = 1.0) -> None:
        """A request enters past the queue, in which nobody waits: its tenant is charged as if it had waited."""
        assert not self._where, "whoever waits goes first"
        found = self._tier(tier)
        found.floor = found.counters[tenant] = max(found.counters.get(tenant, 0.0), found.floor)
        found.counters.move_to_end(tenant)
        self._charge(found, tenant, cost_s / weight)
        self._forget_idle(found)

    def remove(self, entry_id: str) -> Entry[Item] | None:
        """It leaves without being served; None if it does not wait."""
        where = self._where.pop(entry_id, None)
        if where is None:
            return None
        tier = self._tiers[where[0]]
        queue = tier.queues[where[1]]
        entry = queue.entries.pop(entry_id)
        queue.tokens -= entry.tokens
        queue.cost_s -= entry.cost_s
        self._tokens -= entry.tokens
        if entry.kept:
            tier.kept[where[1]] -= 1
            if not tier.kept[where[1]]:
                del tier.kept[where[1]]
        if not queue.entries:
            del tier.queues[where[1]]
            tier.counters.move_to_end(where[1])
            self._forget_idle(tier)
        return entry

    def correct(self, tenant: str, tier: int, seconds: float, *, weight: float = 1.0) -> None:
        """What a served request really took, less what was charged for it; may be negative."""
        found = self._tiers.get(tier)
        if found is not None and tenant in found.counters:
            self._charge(found, tenant, seconds / weight)

    def ahead_s(
        self, tenant: str, tier: int, *, weight: float = 1.0, first: bool = False, owed_s: float = 0.0
    ) -> float:
        """Dominant seconds of waiting work that is served before a request that `tenant` would push now.

        Its own queue (unless it goes `first`), all of more urgent tiers, and of each neighbour what it is owed until
        the counters are level. owed_s: the tenant's work that will come back and go before.
        """
        ahead = sum(
            queue.cost_s for number in self._order if number < tier for queue in self._tiers[number].queues.values()
        )
        same = self._tiers.get(tier)
        if same is None:
            return ahead + owed_s
        own = same.queues.get(tenant)
        own_s = owed_s + (own.cost_s if own is not None and not first else 0.0)
        turn = max(same.counters.get(tenant, 0.0), same.floor) + own_s / weight
        for neighbour, queue in same.queues.items():
            if neighbour != tenant:
                # A neighbour's request that begins before `turn` is served whole, so the one that crosses it counts.
                owed = (turn - same.counters[neighbour]) * _first(queue).weight + _first(queue).cost_s
                ahead += min(queue.cost_s, max(0.0, owed))
        return ahead + own_s

    def take_charges(self) -> dict[str, float]:
        """What tenants were charged since the last call, and 0 for others who wait; refunds count against."""
        charges, self._charges = self._charges, {}
        for _, tenant in self._where.values():
            charges.setdefault(tenant, 0.0)
        return charges

    def add_outside(self, tenant: str, seconds: float) -> None:
        """Another gateway has served the tenant so much; it waits here all the longer."""
        for tier in self._tiers.values():
            if tenant in tier.counters:
                tier.counters[tenant] += seconds

    def counter(self, tenant: str, tier: int) -> float:
        """The service that the tenant has had, in weighted dominant seconds."""
        return self._tiers[tier].counters.get(tenant, 0.0) if tier in self._tiers else 0.0

    def _tier(self, number: int) -> _Tier[Item]:
        tier = self._tiers.get(number)
        if tier is None:
            tier = self._tiers[number] = _Tier()
            self._order = sorted(self._tiers)
        return tier

    def _charge(self, tier: _Tier[Item], tenant: str, seconds: float) -> None:
        self._charges[tenant] = self._charges.get(tenant, 0.0) + seconds
        if len(self._charges) > _CHARGES_MAX:
            self._charges.clear()  # nobody takes them: there are no other gateways
        if tenant in tier.counters:
            # A refund never reaches below the virtual time: it would bank turns.
            tier.counters[tenant] = max(tier.counters[tenant] + seconds, min(tier.floor, tier.counters[tenant]))

    def _forget_idle(self, tier: _Tier[Item]) -> None:
        """Idle tenants' counters are bounded; who is forgotten starts again at the floor."""
        excess = len(tier.counters) - len(tier.queues) - self._bounds.idle_tenants_max
        if excess > 0:
            idle = deque((tenant for tenant in tier.counters if tenant not in tier.queues), maxlen=None)
            for _ in range(excess):
                del tier.counters[idle.popleft()]


def _first(queue: _Queue[Item]) -> Entry[Item]:
    return next(iter(queue.entries.values()))
