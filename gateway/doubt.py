"""Whose answers have outgrown the forecast? Tenants that made an engine take pages back are trusted less for a while.

placing.py tells who ran past what was forecast when an engine retracted, and experience.py plans with what is left of
the trust in each tenant's learned lengths. Pure: clocks are handed in, nothing is known of engines.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping

# Trust is used in so many parts, so that the forecasts drawn with it are few and can be kept.
PARTS = 8
# Below one part nothing is left: ceilings are planned with.
_LEAST = 1 / PARTS
# The longest doubted are forgotten first.
_TENANTS_MAX = 1024


class Doubt:
    """regrowth_s: how long lost trust takes to come back, all of it; 0: nobody is doubted."""

    def __init__(self, regrowth_s: float) -> None:
        self._regrowth_s = regrowth_s
        self._trust: OrderedDict[str, float] = OrderedDict()
        self._parts: dict[str, int] = {}
        self._ticked_at = -math.inf

    def __len__(self) -> int:
        """Tenants that are doubted."""
        return len(self._trust)

    def of(self, tenant: str) -> int:
        """How many of PARTS of its forecast are to be taken from its ceilings."""
        return self._parts.get(tenant, 0)

    def retracted(self, beyond: Mapping[str, int]) -> frozenset[str]:
        """An engine has taken pages back. Whoever caused that loses half of its trust, and is returned.

        beyond: tokens that each tenant's requests there have produced past what was forecast. Those with at least an
        even part of them are the cause; if nobody has any, the pool is short for another reason and nobody is blamed.
        """
        total = sum(beyond.values())
        if not total or not self._regrowth_s:
            return frozenset()
        blamed = frozenset(tenant for tenant, tokens in beyond.items() if tokens * len(beyond) >= total)
        for tenant in blamed:
            trust = self._trust.get(tenant, 1.0) / 2
            self._set(tenant, trust if trust >= _LEAST else 0.0)
        while len(self._trust) > _TENANTS_MAX:
            self._parts.pop(self._trust.popitem(last=False)[0])
        return blamed

    def tick(self, now: float) -> None:
        """Time goes by, and trust grows back evenly."""
        grown = (now - self._ticked_at) / self._regrowth_s if self._trust else 0.0
        self._ticked_at = now
        for tenant, trust in list(self._trust.items()) if grown > 0 else ():
            if trust + grown >= 1.0:
                del self._trust[tenant], self._parts[tenant]
            else:
                self._set(tenant, trust + grown)

    def _set(self, tenant: str, trust: float) -> None:
        self._trust[tenant] = trust
        self._parts[tenant] = math.ceil((1.0 - trust) * PARTS)
