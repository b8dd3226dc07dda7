"""One request inside the engine, from its arrival to its end: tokens, pages, how to sample, how it ended.

The scheduler moves it, the engine appends tokens, intake.py makes it. No torch here.
"""

import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from backends.local.detokenizer import TextStream
from backends.local.kv.prefix import PrefixNode
from backends.page_tags.table import Claim

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by less overflows float32 logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: the chosen token's only."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def filters(self) -> bool:
        """Does it cut the tail of the distribution?"""
        return self.top_p < 1.0 or self.top_k != -1 or self.min_p > 0.0

    @property
    def penalises(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def plain(self) -> bool:
        """The next token is the argmax of the raw logits, and nothing else is asked."""
        return self.greedy and not self.penalises and not self.logit_bias and self.top_logprobs is None


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where the two halves of a pair meet for one request (pair/__init__.py)."""

    host: str
    port: int
    room: int


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the engine gave a request up: what its client gets instead of an answer, in SGLang's words."""

    status: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    matched_stop: int | str | None = None
    """The token id or the stop string that ended it."""
    failure: Failure | None = None
    """Only with ABORT. An abort without one was asked for."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class AnswerGuide(Protocol):
    """Keeps an answer inside its grammar (guide.py); it goes with the tokens, and so survives retraction."""

    @property
    def complete(self) -> bool:
        """Nothing more may come."""

    @property
    def failed(self) -> bool:
        """The answer can't be held to its grammar any more."""

    def mask(self, row: Any) -> None:
        """Leave, in a row of logits (a tensor), only what may come next."""

    def take(self, token: int) -> None:
        """The token that was sampled."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    rid: str
    prompt_tokens: int
    tokens: list[int]
    """Prompt and output, in order; the last one may not be in the cache yet."""
    max_new_tokens: int
    sampling: SamplingParams
    text: TextStream
    stop_token_ids: frozenset[int] = frozenset()
    arrived_at: float = 0.0
    priority: int = 0
    """More is sooner, where the scheduler heeds priorities."""
    cache_scope: str = ""
    """Opaque: only requests of one scope share cached prefixes."""
    bootstrap: Bootstrap | None = None
    """Set where another process computes its prompt or generates its answer."""
    awaits_pages: bool = False
    """Its prompt's keys and values will come from another process."""
    number: int = -1
    """Its place in the order of arrival, given by the scheduler."""
    guide: AnswerGuide | None = None
    rng: random.Random = field(init=False)
    """Its own stream of draws, one a token: neighbours in the batch can't shift it, and it survives retraction."""
    pages: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    """The tag that it was given with each page."""
    prefix: PrefixNode | None = None
    """The deepest node of the prefix cache that it holds: its first `prefix.depth` pages are the cache's."""
    cached_tokens: int | None = None
    """How many prompt tokens it found in the cache when it first ran; what it finds after a retraction is its own."""
    computed: int = 0
    """How many leading tokens have their keys and values in `pages`."""
    finish: Finish | None = None
    retractions: int = 0
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        assert self.tokens
        assert self.prompt_tokens == len(self.tokens)
        self.rng = random.Random(self.sampling.seed)  # noqa: S311  sampling text, not secrets

    @property
    def plain(self) -> bool:
        """The next token is the argmax of the raw logits, and nothing else is asked."""
        return self.sampling.plain and self.guide is None

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def shared_pages(self) -> int:
        """How many of its leading pages the prefix cache owns."""
        return 0 if self.prefix is None else self.prefix.depth

    @property
    def own_claim(self) -> Claim:
        return Claim(self.pages[self.shared_pages :], self.tags[self.shared_pages :])

    def claim(self, pages: int) -> Claim:
        """What it says of its first so many pages."""
        return Claim(self.pages[:pages], self.tags[:pages])
