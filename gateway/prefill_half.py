"""One prefill half as placing sees it, and which of several takes a prompt: the one that has computed it soonest.

Used by search.py for replicas that only decode; what those hold is gate.py's. A prompt is at its half from when it
enters until the half has handed it over. Knows no clock: all times are durations, by the half's own measured speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.forecast import EngineSpeed, attended_by
from gateway.prefixes import NOTHING_KNOWN, Known, Prefixes
from tenancy.values import value


@value
class Prompt:
    """What is to be computed: each of its choices so many tokens. blocks: as of prefixes.py. last_at: the half that had
    the last request of its session; empty for none. believed: how much of what is expected in caches was there so far.
    """

    tokens: int
    choices: int
    blocks: tuple[int, ...] = ()
    last_at: str = ""
    believed: float = 0.0


@dataclass(eq=False, slots=True)
class _Computed:
    uncached: int
    attended: float
    blocks: tuple[int, ...]


@dataclass(eq=False, slots=True)
class PrefillHalf:
    """tokens_ahead_max: uncached tokens that may be on their way into it at once; a larger prompt goes alone.
    takes: has it pages for so many tokens of each of so many choices? open, on_trial: as of a site.
    """

    id: str
    prefixes: Prefixes
    speed: EngineSpeed
    tokens_ahead_max: int
    takes: Callable[[int, int], bool]
    open: bool = False
    on_trial: bool = False
    _inside: dict[str, _Computed] = field(default_factory=dict)
    _uncached: int = 0
    _attended: float = 0.0

    def __len__(self) -> int:
        return len(self._inside)

    def prefilling_s(self) -> float:
        """How long the prompts take that are there."""
        return self.speed.prefill_s(self._uncached, self._attended) if self._inside else 0.0

    def quote(self, prompt: Prompt) -> "Quote":
        """When it would have computed this one as well."""
        known = self.prefixes.known(prompt.blocks, prompt.tokens) if prompt.blocks else NOTHING_KNOWN
        tokens = prompt.tokens * prompt.choices
        # Choices that run side by side each compute the prompt: only the next one would find it.
        uncached = tokens - (int(known.cached_tokens * prompt.believed) if prompt.choices == 1 else 0)
        attended = attended_by(uncached, tokens)
        in_s = self.speed.prefill_s(self._uncached + uncached, self._attended + attended)
        return Quote(self, known, uncached, attended, in_s)

    def takes_now(self, quote: "Quote", prompt: Prompt) -> bool:
        """Has it room in its batch and its pool? On trial it takes one at a time."""
        if not self.open or (self._inside and (self.on_trial or self._is_crowded(quote.uncached))):
            return False
        return self.takes(prompt.tokens, prompt.choices)

    def enter(self, request_id: str, quote: "Quote", blocks: tuple[int, ...]) -> None:
        self._inside[request_id] = _Computed(quote.uncached, quote.attended, blocks)
        self._uncached += quote.uncached
        self._attended += quote.attended
        self.prefixes.entered(request_id, blocks)

    def leave(self, request_id: str) -> None:
        """It has been handed over, or given up. Idempotent."""
        computed = self._inside.pop(request_id, None)
        if computed is not None:
            self._uncached -= computed.uncached
            self._attended = self._attended - computed.attended if self._inside else 0.0
            self.prefixes.left(request_id, computed.blocks)

    def _is_crowded(self, uncached: int) -> bool:
        return self._uncached + uncached > self.tokens_ahead_max


@value
class Quote:
    """What a prompt would take at a half. known: of it. uncached: tokens to compute; attended: each times the context
    that it looks back on. in_s: until it is computed, what is there before it included.
    """

    half: PrefillHalf
    known: Known
    uncached: int
    attended: float
    in_s: float


def choose(halves: Sequence[PrefillHalf], prompt: Prompt, *, delay_s_max: float) -> Quote | None:
    """The half that takes it now and is done soonest; None if none takes it.

    One that has its prefix, or the last request of its session, goes first as long as that delays it by no more than
    delay_s_max: what it is not yet believed to save shows only where it is tried.
    """
    quotes = [quote for half in halves if half.takes_now(quote := half.quote(prompt), prompt)]
    if len(quotes) < 2:
        return quotes[0] if quotes else None
    quotes.sort(key=_soonest)
    near = (one for one in quotes if one.known.cached_tokens or one.half.id == prompt.last_at)
    return next((one for one in near if one.in_s <= quotes[0].in_s + delay_s_max), quotes[0])


def _soonest(quote: Quote) -> tuple[float, int]:
    return quote.in_s, len(quote.half)
