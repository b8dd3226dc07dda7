"""Which replica? The order in which replicas are asked to take a request. Pure; search.py asks, placing.py takes.

A replica that has the request's prefix, or its session, goes first for as long as that delays the first token by no
more than a set bound over the best replica; then the emptiest go first. Equal prompts that keep coming therefore stay
together until their replica is busy, and prompts that share nothing spread by load.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar


class Loaded(Protocol):
    """What the order goes by. load: grows with what is in use and what is being prefilled."""

    @property
    def load(self) -> float: ...


Site = TypeVar("Site", bound=Loaded)

LOAD = attrgetter("load")


def by_load(sites: Iterable[Site]) -> list[Site]:
    """The emptiest first."""
    return sorted(sites, key=LOAD)


def with_affinity(
    near: Sequence[tuple[Site, float]], others: list[Site], best_s: float, *, delay_s_max: float
) -> list[Site]:
    """near: replicas with something of the request, beside the seconds to its first token there.

    others: all, the emptiest first. best_s: seconds to the first token at the emptiest. Who delays it too much has no
    precedence, and keeps its place among the others.
    """
    close = [site for site, first_s in sorted(near, key=lambda pair: pair[1]) if first_s <= best_s + delay_s_max]
    return [*close, *(site for site in others if site not in close)] if close else others
