"""What a request used: token counts by class, and the one record that is kept of it.

Made by the gateway from the engine's own figures; read by rating.py, metering.py and the usage queries.
"""

from enum import StrEnum

from billing.attribution import UNATTRIBUTED, Attribution
from tenancy.values import value


class UsageSource(StrEnum):
    """Where token counts come from."""

    ENGINE = "engine"  # the engine's final usage
    ENGINE_RUNNING = "engine_running"  # the engine's running usage at the moment the stream stopped
    ESTIMATED = "estimated"  # the engine could not say: counted in the customer's favour
    RECOVERED = "recovered"  # from the durable record of a gateway that died


@value
class TokenUsage:
    """Tokens by class. cached is part of prompt, reasoning is part of completion: each token is priced once."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    source: UsageSource = UsageSource.ENGINE

    def __post_init__(self) -> None:
        assert 0 <= self.cached <= self.prompt, f"cached tokens must be a part of prompt tokens: {self}"
        assert 0 <= self.reasoning <= self.completion, f"reasoning tokens must be a part of completion tokens: {self}"


NO_USAGE = TokenUsage()


@value
class RequestFacts:
    """What is known when a request is dispatched; the durable BEGIN record.

    started_at_ns: Unix time in nanoseconds at which the request arrived; the price in force then is price_version's.
    deployment: the revision of the model's deployment; precisions: as it was served, "weights=bf16,kv_cache=fp8".
    tier: that of the price, so the one that is served; of a request without a price, the one that was wanted.
    """

    request_id: str
    account_id: str
    key_id: str
    model: str
    endpoint: str  # the dialect's route: "chat", "completions", "responses" or "run"
    stream: bool
    prompt_tokens: int
    price_version: int
    started_at_ns: int
    tier: str = "standard"
    attribution: Attribution = UNATTRIBUTED
    deployment: str | None = None
    precisions: str | None = None


@value
class UsageRecord:
    """One request, ended: the durable END record and the row of `usage_events` (id = request id).

    outcome: one of gateway.request.Outcome's values. charged: whether usage is billed (False: cost is 0 although tokens
    are recorded). kv_page_ms: KV pages times the milliseconds that they were in use. Times in whole milliseconds;
    ttft_ms is None if no token came. code: the stable code of the error or refusal, None if finished.
    region: where the engine is that served it.
    """

    facts: RequestFacts
    outcome: str
    usage: TokenUsage
    charged: bool
    ended_at_ns: int
    queued_ms: int
    ttft_ms: int | None
    replica: str | None
    finish_reason: str | None
    code: str | None
    kv_page_ms: int = 0
    region: str | None = None
