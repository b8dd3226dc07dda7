"""A request of a trace, and what became of it. Filled in by the engine and the doors, read by the report."""

from dataclasses import dataclass
from enum import Enum


class Fate(Enum):
    """Where it is, or how it ended."""

    WAITING = "waiting"
    REFUSED = "refused"
    EVICTED = "evicted"
    SENT = "sent"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """blocks: ids of the prompt's full cache blocks; equal ids at equal places are a shared prefix. Times: seconds.

    returns: its client comes again, once, when it is told to; `retry` is then its second request, whose `origin` names
    the first.
    """

    id: str
    tenant: str
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    ceiling: int
    blocks: tuple[int, ...] = ()
    fate: Fate = Fate.WAITING
    produced: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    sent_at: float | None = None
    prefill_at: float | None = None
    first_at: float | None = None
    finished_at: float | None = None
    retry_after_s: float | None = None
    returns: bool = False
    origin: str = ""
    retry: "SimulatedRequest | None" = None

    @property
    def answered(self) -> "SimulatedRequest":
        """The request that counts for its client: the last that was sent."""
        return self.retry or self

    @property
    def first_s(self) -> float | None:
        """Time to the first token, from arrival."""
        return None if self.first_at is None else self.first_at - self.arrived_at

    @property
    def between_s(self) -> float | None:
        """Mean time between tokens; None for a single token."""
        if self.first_at is None or self.finished_at is None or self.output_tokens < 2:
            return None
        return (self.finished_at - self.first_at) / (self.output_tokens - 1)
