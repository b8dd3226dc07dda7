"""Places kept for those who were told to come again: a hint is a promise, and the same prompt redeems it in time.

A client that obeys `Retry-After` sends the same request again, so it is known by its tenant and its prompt's digest and
needs no ticket. What is promised counts as work ahead of the tenant's new requests, by the part of promises that turn
out to be called for; nothing is kept idle for it. Used by door.py. Pure; seconds only.
"""

from collections import OrderedDict
from dataclasses import dataclass

# Clients add a little of their own to a hint, and their clocks are their own.
_EARLY_S = 0.25
_GRACE_LEAST_S = 5.0
_GRACE_MOST_S = 30.0
# Of the promises, the part that is called for: an exponential mean over about the last so many.
_PACE = 1 / 32
# What rounding leaves of a sum.
_NOTHING_S = 1e-9


@dataclass(frozen=True, slots=True)
class _Promise:
    tenant: str
    at: float
    until: float
    cost_s: float


class Promises:
    """most: promises remembered; the oldest are forgotten first."""

    def __init__(self, *, most: int = 8192) -> None:
        self._most = most
        self._open: OrderedDict[tuple[str, bytes], _Promise] = OrderedDict()
        self._owed_s: dict[str, float] = {}
        self._called_share = 0.5

    def __len__(self) -> int:
        return len(self._open)

    def owed_s(self, tenant: str) -> float:
        """Dominant seconds that the tenant's promises will probably take."""
        return self._owed_s.get(tenant, 0.0) * self._called_share if self._owed_s else 0.0

    def give(self, tenant: str, digest: bytes, *, now: float, in_s: float, cost_s: float) -> None:
        """It was told to come again in so many seconds. A second promise for the same replaces the first."""
        self._drop((tenant, digest))
        grace_s = min(_GRACE_MOST_S, max(_GRACE_LEAST_S, in_s))
        self._open[tenant, digest] = _Promise(tenant, now + in_s, now + in_s + grace_s, cost_s)
        self._owed_s[tenant] = self._owed_s.get(tenant, 0.0) + cost_s
        if len(self._open) > self._most:
            self._drop(next(iter(self._open)))

    def redeem(self, tenant: str, digest: bytes, now: float) -> bool:
        """Has it come when it was told? Then its place is kept once. Who comes too early has to come again."""
        promise = self._open.get((tenant, digest))
        if promise is None or now < promise.at - _EARLY_S:
            return False
        self._drop((tenant, digest))
        kept = now <= promise.until
        self._learn(called=kept)
        return kept

    def lapse(self, now: float) -> None:
        """Forget promises whose time is over. Cheap enough for every poll."""
        for key in [key for key, promise in self._open.items() if promise.until < now]:
            self._drop(key)
            self._learn(called=False)

    def _learn(self, *, called: bool) -> None:
        self._called_share += _PACE * (called - self._called_share)

    def _drop(self, key: tuple[str, bytes]) -> None:
        promise = self._open.pop(key, None)
        if promise is None:
            return
        left = self._owed_s.get(promise.tenant, 0.0) - promise.cost_s
        if left > _NOTHING_S:
            self._owed_s[promise.tenant] = left
        else:
            self._owed_s.pop(promise.tenant, None)
