"""What the gateway itself knows of shared prefixes at one replica: who runs with which blocks, and what may be cached.

Used by the doors that decide as the service does. A block held by several running requests is counted once, with the
one that has held it longest; when that one leaves, the next inherits it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.replay.traces import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Known:
    """Of a prompt's tokens: shared with a running request, and expected in cache (shared ones included)."""

    shared_tokens: int
    cached_tokens: int


class Prefixes:
    """capacity_tokens bounds what may still be in the engine's cache: the least recently seen is forgotten."""

    def __init__(self, capacity_tokens: int) -> None:
        self._recent_max = max(1, capacity_tokens // BLOCK_TOKENS)
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[int, dict[str, None]] = {}

    def known(self, blocks: Sequence[int], prompt_tokens: int) -> Known:
        most = (prompt_tokens - 1) // BLOCK_TOKENS  # the last token is always computed
        shared = cached = 0
        for block in blocks[:most]:
            if block in self._holders and shared == cached:
                shared += 1
            elif block not in self._recent:
                break
            cached += 1
        return Known(shared * BLOCK_TOKENS, cached * BLOCK_TOKENS)

    def entered(self, request_id: str, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._holders.setdefault(block, {})[request_id] = None
        for block in reversed(blocks):  # deeper blocks are older, as in the engine
            self._recent[block] = None
            self._recent.move_to_end(block)
        while len(self._recent) > self._recent_max:
            self._recent.popitem(last=False)

    def left(self, request_id: str, blocks: Sequence[int]) -> dict[str, int]:
        """It has left: who inherits how many tokens."""
        heirs: dict[str, int] = {}
        for block in blocks:
            holders = self._holders[block]
            owner = next(iter(holders))
            del holders[request_id]
            if not holders:
                del self._holders[block]
            elif owner == request_id:
                heir = next(iter(holders))
                heirs[heir] = heirs.get(heir, 0) + BLOCK_TOKENS
        return heirs
