"""May it enter? Pure arithmetic over plain values: what a request needs, what a replica has, how long to wait.

Called by pipeline.py and waiting_room.py; knows no clock, socket or engine. Words: a page holds `page_tokens` tokens of
KV for all layers; a hold is what the gateway has promised at one replica; a snapshot is the engine's own report.
"""

import math
from dataclasses import dataclass
from enum import Enum

from gateway.errors import PromptTooLong
from gateway.request import OutputCap


class Verdict(Enum):
    """May the request be dispatched?"""

    FITS_NOW = "fits_now"
    FITS_LATER = "fits_later"
    UNKNOWN = "unknown"  # no report from the replica: neither idle nor full


@dataclass(frozen=True, slots=True)
class Capacity:
    """One replica as the gateway sees it, in pages.

    used_pages: the engine's report (evictable cache counts as free). held_pages: all of our own open holds there.
    unseen_pages: our holds dispatched after the snapshot, which the report can't contain yet.
    """

    total_pages: int
    used_pages: int
    held_pages: int
    unseen_pages: int
    running: int
    running_max: int

    @property
    def free_pages(self) -> int:
        """The larger of ledger and report counts as taken, so that neither ghosts nor lag over-admit."""
        return self.total_pages - max(self.held_pages, self.used_pages + self.unseen_pages)


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` tokens: every size rounds up."""
    return -(-tokens // page_tokens)


def output_cap(
    *,
    requested: int | None,
    prompt_tokens: int,
    output_tokens_max: int,
    context_tokens: int,
    pool_tokens: int,
    prompt_tokens_max: int | None = None,
) -> OutputCap:
    """How many tokens a choice may have: the least of model limit, context and a replica's whole pool.

    An explicit larger request is clamped and marked so. Raises PromptTooLong if the prompt leaves no room for a token,
    or is over prompt_tokens_max, the pool of a pair's prefill half.
    """
    if prompt_tokens_max is not None and prompt_tokens > prompt_tokens_max:
        raise PromptTooLong(prompt_tokens=prompt_tokens, limit_tokens=prompt_tokens_max)
    room = min(context_tokens, pool_tokens) - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens=prompt_tokens, limit_tokens=min(context_tokens, pool_tokens) - 1)
    most = min(output_tokens_max, room)
    if requested is None:
        return OutputCap(tokens=most, clamped=False)
    return OutputCap(tokens=min(requested, most), clamped=requested > most)


def pages_needed(
    *, prompt_tokens: int, cap_tokens: int, choices: int, outputs_ahead: int, page_tokens: int, total_pages: int
) -> int:
    """Pages to hold at dispatch: the prompt and the next `outputs_ahead` outputs, for each choice.

    Never more than the whole pool: n choices that could not all stand in it side by side run there one after another.
    """
    each = pages_for(prompt_tokens + min(cap_tokens, outputs_ahead), page_tokens)
    return min(each * choices, total_pages)


def verdict(need_pages: int, capacity: Capacity | None) -> Verdict:
    """The crossing request's own size always counts; an idle replica takes whatever fits its whole pool."""
    if capacity is None:
        return Verdict.UNKNOWN
    if need_pages <= capacity.free_pages and capacity.running < capacity.running_max:
        return Verdict.FITS_NOW
    return Verdict.FITS_LATER


def retry_after_s(*, ahead: int, running: int, mean_duration_s: float, jitter: float, most_s: int) -> int:
    """Seconds until a retry has a fair chance: the requests ahead leave at the rate the running ones end.

    jitter: in [0, 1), drawn per request, spreads retries over a further quarter so that they don't return together.
    """
    expected = mean_duration_s * (ahead + 1) / max(1, running)
    return max(1, min(most_s, math.ceil(expected * (1 + jitter / 4))))
