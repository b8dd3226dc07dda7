"""Bounds of the gateway: how long a request may wait, how many may, and how often engines are asked how they are."""

from pydantic import BaseModel, ConfigDict, Field


class TierSettings(BaseModel):
    """What one tier is promised where it differs from all. None: as the others."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    first_token_seconds_max: float | None = Field(default=None, gt=0)
    between_tokens_ms_max: float | None = Field(default=None, gt=0)
    queue_wait_seconds_max: float | None = Field(default=None, gt=0, le=3600)


class GatewaySettings(BaseModel):
    """Read by api/settings.py from `PAGEGATE_GATEWAY__*` or the TOML table `[gateway]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    queue_entries_max: int = Field(default=256, ge=0, description="Requests that may wait for pages, per model.")
    queue_tenant_entries_max: int = Field(
        default=128, ge=1, description="Of these, how many one account may have, so that none can fill the queue alone."
    )
    queue_tokens_max: int = Field(
        default=1 << 22, ge=1, description="Prompt tokens that may wait, per model; half of it for one account."
    )
    pages_timeout_s: float = Field(
        default=0.5,
        gt=0,
        description="How long the server of shared pages may take to answer. No request waits for it.",
    )
    pages_lease_s: float = Field(
        default=3.0,
        ge=0.5,
        description="After so long without a word from a gateway another one stops its requests and frees its pages.",
    )
    queue_wait_seconds_max: float = Field(
        default=60.0, gt=0, le=3600, description="A request leaves the queue after this long."
    )
    first_token_seconds_max: float | None = Field(
        default=None,
        gt=0,
        description="The promise of a first token: who can't have it in time is told so. None: as long as it may wait.",
    )
    between_tokens_ms_max: float | None = Field(
        default=None,
        gt=0,
        description="The promise of a mean time between tokens: nobody starts at the cost of it. None: pages decide.",
    )
    tiers: dict[int, TierSettings] = Field(
        default_factory=dict, description="Promises of single tiers where they differ, by the tier's number."
    )
    prefill_tokens_ahead_max: int = Field(
        default=8192,
        ge=1,
        description="Uncached prompt tokens on their way into an engine at once: its prefill batch "
        "(SGLang's --chunked-prefill-size). More would wait in its queue, where turns are not ours.",
    )
    engine_reserved_tokens: int = Field(
        default=0,
        ge=0,
        description="Outputs that the engine reserves per request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION); "
        "0: it reserves nothing, or too little to matter.",
    )
    overflow_share: float = Field(
        default=0.01, gt=0, le=0.5, description="How often a request's forecast peak may pass capacity."
    )
    margin_deviations: float = Field(
        default=2.0, ge=0, description="Standard deviations of report against ledger that stay free as reports age."
    )
    trust_regrowth_seconds: float = Field(
        default=300.0,
        ge=0,
        description="An account whose answers outgrew the forecast, so that an engine took pages back, is planned with "
        "more carefully until its trust has grown back within this time. 0: nobody is.",
    )
    affinity_seconds_max: float = Field(
        default=1.0, ge=0, description="By how much a cached prefix or a session may delay a first token."
    )
    retry_after_seconds_max: int = Field(default=60, ge=1, description="The largest Retry-After that is ever sent.")
    hold_outputs_ahead: int = Field(
        default=1024, ge=1, description="Output tokens held ahead of a stream, in money and in pages."
    )
    progress_interval_s: float = Field(
        default=0.25, gt=0, description="How often a running stream's token counts go to the durable record."
    )
    first_event_wait_s: float = Field(
        default=2.0,
        ge=0,
        description="A stream's headers wait this long for its first token, so that an early failure is a real status.",
    )
    answer_bytes_max: int = Field(
        default=32 << 20,
        ge=1024,
        le=256 << 20,
        description="Text and log-probabilities of an answer that is not streamed and is put together here: who asks "
        "for more is refused, and one that grows larger ends there (`length`).",
    )
    response_kept_seconds: int = Field(
        default=86_400, ge=60, le=30 * 86_400, description="How long a response is kept that asks for it (`store`)."
    )
    response_kept_bytes_max: int = Field(
        default=512 * 1024, ge=1_024, le=16 << 20, description="A larger conversation is not kept."
    )
    responses_kept_per_account_max: int = Field(
        default=1_000, ge=1, le=1_000_000, description="Beyond this many an account's oldest responses are forgotten."
    )
    responses_kept_bytes_per_account_max: int = Field(
        default=128 << 20, ge=16 << 20, description="Beyond so many bytes an account's oldest responses are forgotten."
    )
    abort_wait_s: float = Field(
        default=3.0,
        gt=0,
        description="How long an aborted engine call may take to say what it produced; the engine stops at once.",
    )
    poll_interval_busy_s: float = Field(default=0.2, gt=0, description="Engine polls while requests run or wait.")
    poll_interval_idle_s: float = Field(default=1.0, gt=0, description="Engine polls while nothing runs.")
    figures_interval_s: float = Field(
        default=2.0, gt=0, description="Reads of an engine's metrics, which the operator's live page shows."
    )
    rollout_interval_s: float = Field(
        default=0.5,
        gt=0,
        le=10,
        description="How soon what was decided of a rollout is followed, and counts are shared.",
    )
    poll_failures_max: int = Field(
        default=3, ge=1, description="Polls that fail, of two more, before a replica is down."
    )
    remote_probe_seconds_max: float = Field(
        default=1.5,
        gt=0,
        description="How long an engine in another region may take to say how it is, beside the round trips: packets "
        "that are lost on the way are refused by nobody.",
    )
    slow_start_seconds: float = Field(
        default=10.0,
        ge=0,
        description="After a region's replicas were all away one that comes back gets its whole share no sooner.",
    )
    replica_faults_max: int = Field(
        default=5, ge=1, description="Of a replica's last eight answers, those that it fails before it rests a while."
    )
    replica_stalled_seconds_max: float = Field(
        default=30.0, gt=0, description="A replica that runs requests and shows no work for so long gets no new ones."
    )
    tokenise_inline_chars_max: int = Field(
        default=4096, ge=0, description="Prompts up to this size are tokenised on the event loop, others in a thread."
    )
    tokenise_threads: int = Field(default=2, ge=1, le=64, description="Threads that tokenise long prompts.")
