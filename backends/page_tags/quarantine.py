"""Pages whose tags didn't match: out of circulation until the pool is made anew, and counted.

The engine's worker puts them in; its allocator asks before it hands a freed page out again. A mismatch means that the
book-keeping of that page is wrong somewhere, so nobody is given it until a human has looked. Knows page numbers only.
"""

from collections.abc import Iterable


class Quarantine:
    """pages_max: with more pages than this the engine is no longer trusted (`overflowing`)."""

    def __init__(self, *, pages_max: int) -> None:
        assert pages_max >= 0
        self._pages: set[int] = set()
        self._pages_max = pages_max
        # Requests that were stopped because of a stale page, since the start.
        self.requests_aborted = 0
        # Pages that were refused where they change hands, before anybody read them (a stale node of a prefix cache).
        self.handovers_refused = 0

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def overflowing(self) -> bool:
        """More than chance explains: the engine should drain and restart."""
        return len(self._pages) > self._pages_max

    def abort(self, stale_pages: Iterable[int]) -> list[int]:
        """A request was stopped because of these pages. Those that are new here, so that they are reported once."""
        self.requests_aborted += 1
        return self._keep(stale_pages)

    def refuse(self, stale_pages: Iterable[int]) -> list[int]:
        """These pages were about to be given to a request, by somebody who does not own them any more: as `abort`."""
        stale = list(stale_pages)
        self.handovers_refused += len(stale)
        return self._keep(stale)

    def usable(self, pages: Iterable[int]) -> list[int]:
        """Of pages that are about to be free: those that may be handed out again, in the same order."""
        return [page for page in pages if page not in self._pages]

    def _keep(self, pages: Iterable[int]) -> list[int]:
        new = sorted(set(pages) - self._pages)
        self._pages.update(new)
        return new
