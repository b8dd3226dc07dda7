"""Which tests run in one worker, and in which order, when `-n` gives them several: pytest-xdist asks, by conftest.py.

Dear files go first, so that no worker is left alone with one at the end. A folder whose tests share a server that takes
long to start stays in one worker, so that there is one of it: SGLang's import alone is half a minute of CPU.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # it says nothing of its types

_TOGETHER = ("tests/sglang_cpu/", "tests/browser/")
# Dearest first: most of what a file without any of these costs is the start of a worker.
_DEAR = ("sglang", "browser", "load", "engine", "stores")


class Distribution(LoadFileScheduling):  # type: ignore[misc]  # see its import
    """By file, except for what must stay together; in the order of the collection, not of the files' lengths."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def schedule(self) -> None:
        """A worker begins with a test when it knows which comes next, or that none does: one that stands in for a dead
        worker was told one test alone, and waited for ever.
        """
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node: Any) -> Any:
        """The test that a dead worker was at has failed; left among those to run, it would kill the next worker too."""
        tests = (tests for tests in self.assigned_work[node].values() if not all(tests.values()))
        unfinished = next(tests, None)
        if unfinished is None:
            return super().remove_node(node)
        failed = next(nodeid for nodeid, is_over in unfinished.items() if not is_over)
        unfinished[failed] = True
        super().remove_node(node)
        return failed


def unit(nodeid: str) -> str:
    """What this test runs with, in one worker: its file or its folder."""
    return next((folder for folder in _TOGETHER if nodeid.startswith(folder)), nodeid.partition("::")[0])


def dearest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Units by the dearest test that each has; those that cost the same, and the tests of each, as they stood."""
    found = list(items)
    rank: dict[str, int] = {}
    for item in found:
        of_item = min((place for place, mark in enumerate(_DEAR) if item.get_closest_marker(mark)), default=len(_DEAR))
        rank[unit(item.nodeid)] = min(of_item, rank.get(unit(item.nodeid), of_item))
    return sorted(found, key=lambda item: rank[unit(item.nodeid)])
