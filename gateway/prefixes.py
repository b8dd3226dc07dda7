"""What the gateway itself knows of shared prefixes at one replica: who runs with which blocks, and what may be cached.

Used by placing.py, in service and in the replay. Blocks are named by the whole prefix that ends in them and by the
tenant whose it is (`block_ids`), so that equal prompts of two tenants have nothing in common here. A block held by
several running requests is counted once, with the one that has held it longest; when that one leaves, the next
inherits it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

# Also the block of the public traces; a last, partial one is never shared.
BLOCK_TOKENS = 512


def block_ids(prompt_ids: Sequence[int], salt: bytes) -> tuple[int, ...]:
    """One id for each full block of the prompt. salt: the tenant's, so that nobody meets another's blocks."""
    if len(prompt_ids) < BLOCK_TOKENS:
        return ()
    chain, ids = blake2b(salt, digest_size=8), []
    for end in range(BLOCK_TOKENS, len(prompt_ids) + 1, BLOCK_TOKENS):
        chain.update(array("I", prompt_ids[end - BLOCK_TOKENS : end]).tobytes())
        ids.append(int.from_bytes(chain.digest(), "little"))
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class Known:
    """Of a prompt's tokens: shared with a running request, and expected in cache (shared ones included)."""

    shared_tokens: int
    cached_tokens: int


NOTHING_KNOWN = Known(0, 0)


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
        return Known(shared * BLOCK_TOKENS, cached * BLOCK_TOKENS) if cached else NOTHING_KNOWN

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
