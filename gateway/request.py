"""The words the gateway speaks: a request, its deadline, its outcome, and what an ended request came to.

Dialects translate their bodies into a GenerationRequest, and its results into theirs; nothing here knows HTTP.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any

from billing.attribution import UNATTRIBUTED, Attribution
from billing.price_book import Tier
from billing.usage import TokenUsage
from gateway.decision import Decision
from tenancy.claims import Standing
from tenancy.principal import Principal
from tenancy.values import value


class Outcome(StrEnum):
    """The one way a request ended; low cardinality, also the metric's label and the usage record's word."""

    FINISHED = "finished"
    REFUSED = "refused"  # before any engine work
    EVICTED = "evicted"  # left the queue at its deadline
    CANCELLED = "cancelled"  # by us: shutdown, or recovered from a gateway that died
    CLIENT_DISCONNECTED = "client_disconnected"
    UPSTREAM_FAILED = "upstream_failed"  # the engine's fault
    INTEGRITY_ABORT = "integrity_abort"  # a page tag did not match


# Who pays: a departed client and a cancellation pay for what the engine produced; our own failures cost nothing.
CHARGED_OUTCOMES = frozenset({Outcome.FINISHED, Outcome.CANCELLED, Outcome.CLIENT_DISCONNECTED})


class Endpoint(StrEnum):
    """Which surface of the engine serves the request."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@value
class GenerationRequest:
    """One validated request, whichever dialect it came in.

    id: UUIDv7 text of 36 characters, ours; also the engine's `rid` and the answer's id.
    messages: for CHAT, role/content mappings whose content is text (dialects flatten parts and null); prompt: for
    COMPLETIONS and raw prompts, text or token ids. Exactly one of the two is set; raw prompts skip the chat template.
    sampling: engine fields by their SGLang names, already range-checked (temperature, top_p, top_k, min_p, seed, stop,
    frequency_penalty, presence_penalty, repetition_penalty, logit_bias, logprobs, top_logprobs, ...).
    max_tokens: what the client asked for, None if it did not. received_at_ns: Unix time. route: the usage record's
    word. deadline_s: seconds from arrival after which waiting is given up. session: the client's word for requests that
    belong together, for routing alone. first_event_s: how long a stream is not begun for want of its first chunk; None
    for the server's own wait. fallbacks: models to be asked in their order if this one can't serve it (attempts.py).
    decision: filled in as it goes. service_tier: the tier that was asked for, None if none was; the price says which is
    served. attribution: whom and what the client says it is for.
    """

    id: str
    principal: Principal
    model: str
    endpoint: Endpoint
    route: str
    messages: tuple[Mapping[str, Any], ...] | None
    prompt: str | tuple[int, ...] | None
    sampling: Mapping[str, Any]
    max_tokens: int | None
    n: int
    stream: bool
    reject_if_busy: bool
    received_at_ns: int
    deadline_s: float
    session: str = ""
    first_event_s: float | None = None
    fallbacks: tuple[str, ...] = ()
    service_tier: Tier | None = None
    attribution: Attribution = UNATTRIBUTED
    decision: Decision = field(default_factory=Decision, compare=False)

    def __post_init__(self) -> None:
        assert (self.messages is None) != (self.prompt is None), "exactly one of messages and prompt"
        assert self.n >= 1, "n is validated by the dialect"

    def asked(self) -> dict[str, Any]:
        """What makes two requests the same, apart from their route."""
        return {
            "model": self.model,
            "messages": self.messages,
            "prompt": self.prompt,
            "sampling": self.sampling,
            "max_tokens": self.max_tokens,
            "n": self.n,
            "stream": self.stream,
            "fallbacks": self.fallbacks,
            "service_tier": self.service_tier,
        }


@value
class OutputCap:
    """How many tokens each choice may have: requested or the default, clamped to what fits."""

    tokens: int
    clamped: bool  # an explicit max_tokens was lowered: the answer says so
    by_money: bool = False  # to what the account has left, which also lowers what nobody asked for


@value
class Settlement:
    """What an ended request came to: durable when this exists.

    cost_nano: nano-USD. neurons_micro: millionths of a neuron (an exact integer: tokens × neurons per million).
    tier: the one that was served, and priced.
    """

    outcome: Outcome
    usage: TokenUsage
    cost_nano: int
    neurons_micro: int
    price_version: int
    tier: str = Tier.STANDARD


@value
class Completion:
    """A finished request that was not streamed.

    choices: the engine's own choice objects (index, message or text, logprobs, finish_reason), in order of index; of a
    long one log-probabilities are JSON already (orjson.Fragment).
    standings: the account's meters as the request's reservation left them.
    """

    created: int
    choices: tuple[dict[str, Any], ...]
    cap: OutputCap
    settlement: Settlement
    standings: tuple[Standing, ...] = ()
