"""Which replicas may have something of a request: its prompt's first block, or the last request of its session.

Kept by placing.py. What exactly a replica has of a prompt is prefixes.py's. Both tables are bounded.
"""

from collections import OrderedDict
from collections.abc import Mapping

from gateway.prefixes import Known
from gateway.regions import allows
from gateway.site import Site
from gateway.want import Want

# As many as engines' caches have room for: who has forgotten a block is asked in vain once, and then not again.
_BLOCKS_MAX = 65_536


class Whereabouts:
    """sessions_max: remembered."""

    def __init__(self, *, sessions_max: int) -> None:
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._known_by: dict[int, set[str]] = {}  # first blocks, and where they may be known

    def last_at(self, want: Want) -> str:
        """The replica, or prefill half, that had the last request of its session; empty for none."""
        return self._sessions.get((want.tenant, want.session), "") if want.session else ""

    def near(self, want: Want, sites: Mapping[str, Site]) -> list[tuple[Site, Known]]:
        """Those open to it that have something of it: its prefix, or its session."""
        names = set(self._known_by.get(want.blocks[0], ())) if want.blocks else set()
        if want.session and (last := self.last_at(want)):
            names.add(last)
        near = []
        for name in sorted(names):
            site = sites.get(name)
            if site is not None and site.open and allows(want.regions, site.region):
                near.append((site, site.prefixes.known(want.blocks, want.prompt_tokens)))
        return near

    def note_session(self, want: Want, name: str) -> None:
        """Its session was there last: at a replica, or the prefill half that computes its prompt."""
        if not want.session:
            return
        self._sessions[want.tenant, want.session] = name
        self._sessions.move_to_end((want.tenant, want.session))
        if len(self._sessions) > self._sessions_max:
            self._sessions.popitem(last=False)

    def note_prompt(self, want: Want, site_id: str) -> None:
        """Its prompt is computed by this replica itself."""
        if not want.blocks:
            return
        self._known_by.setdefault(want.blocks[0], set()).add(site_id)
        if len(self._known_by) > _BLOCKS_MAX:
            del self._known_by[next(iter(self._known_by))]

    def forget(self, site_id: str) -> None:
        """It is gone, and its cache with it."""
        for where in self._known_by.values():
            where.discard(site_id)
