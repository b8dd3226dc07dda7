"""Bounds of the gateway: how long a request may wait, how many may, and how often engines are asked how they are."""

from pydantic import BaseModel, ConfigDict, Field


class GatewaySettings(BaseModel):
    """Read by api/settings.py from `PAGEGATE_GATEWAY__*` or the TOML table `[gateway]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queue_entries_max: int = Field(default=256, ge=0, description="Requests that may wait for pages, per model.")
    queue_tenant_entries_max: int = Field(
        default=128, ge=1, description="Of these, how many one account may have, so that none can fill the queue alone."
    )
    queue_tokens_max: int = Field(
        default=1 << 22, ge=1, description="Prompt tokens that may wait, per model; half of it for one account."
    )
    queue_wait_seconds_max: float = Field(
        default=60.0, gt=0, le=3600, description="A request leaves the queue after this long."
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
    abort_wait_s: float = Field(
        default=3.0,
        gt=0,
        description="How long an aborted engine call may take to say what it produced; the engine stops at once.",
    )
    poll_interval_busy_s: float = Field(default=0.2, gt=0, description="Engine polls while requests run or wait.")
    poll_interval_idle_s: float = Field(default=1.0, gt=0, description="Engine polls while nothing runs.")
    poll_failures_max: int = Field(default=3, ge=1, description="Polls in a row that fail before a replica is down.")
    tokenise_inline_chars_max: int = Field(
        default=4096, ge=0, description="Prompts up to this size are tokenised on the event loop, others in a thread."
    )
    tokenise_threads: int = Field(default=2, ge=1, le=64, description="Threads that tokenise long prompts.")
