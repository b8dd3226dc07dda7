"""One comparison of all (page, expected tag) pairs of a step, before the step reads or writes the cache.

An engine's worker calls it with what its requests remember: the pages they read and the page they write. It says which
requests hold a page that has changed hands since; what happens to them is the engine's affair. Knows torch and nothing
of requests, allocators or numpy.

    page      7  8  9 | 3  4 | 5        flat, request after request
    expected  1  1  3 | 1  1 | 7
    stale     -  -  x | -  - | -        by pair
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from backends.page_tags.table import UNTAGGED, Claim, TagTable


def mismatches(tags: Tensor, pages: Tensor, expected: Tensor) -> Tensor:
    """By pair: the page has not the expected tag, or none was expected at all. Tags are 32-bit patterns in int32."""
    return (tags[pages] != expected) | (expected == UNTAGGED)


class StepCheck:
    """Checks steps on the host, over a table's own memory. pairs_checked: how many pairs it has compared in all."""

    def __init__(self, table: TagTable) -> None:
        # Shares memory with the table: a tag that changes there is seen here, and nothing is copied.
        self._tags = torch.frombuffer(table.memory, dtype=torch.int32)
        self.pairs_checked = 0

    def stale_pages(self, claims: Sequence[Claim]) -> dict[int, list[int]]:
        """The pages that are no longer theirs, by position of the claim; empty when the step may go on as it is."""
        pages, expected, ends = array("q"), array("I"), []
        for claim in claims:
            assert len(claim.pages) == len(claim.tags), "a page without a tag is never used"
            pages.extend(claim.pages)
            expected.extend(claim.tags)
            ends.append(len(pages))
        if not pages:
            return {}
        self.pairs_checked += len(pages)
        differs = mismatches(
            self._tags, torch.frombuffer(pages, dtype=torch.int64), torch.frombuffer(expected, dtype=torch.int32)
        )
        stale: dict[int, list[int]] = {}
        # Whose pair it is matters only once one differs, so a step in order pays for no owners.
        if bool(differs.any()):
            for pair in differs.nonzero().flatten().tolist():
                stale.setdefault(bisect_right(ends, pair), []).append(pages[pair])
        return stale
