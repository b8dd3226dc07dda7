"""Bounds of waking and sleeping. Read by api/settings.py from `PAGEGATE_LIFECYCLE__*` or the table `[lifecycle]`."""

from pydantic import BaseModel, ConfigDict, Field

from gateway.lifecycle.states import StartLimits


class LifecycleSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    start_seconds_max: float = Field(
        default=900.0, gt=0, le=7_200, description="An engine that can't be used so long after its start has failed."
    )
    start_seconds_expected: float = Field(
        default=30.0, gt=0, description="How long a start is presumed to take before one has been seen."
    )
    start_failures_max: int = Field(
        default=5, ge=1, description="After so many failed starts in a row an engine rests."
    )
    start_backoff_seconds: float = Field(
        default=0.5, gt=0, description="The pause after a failed start; doubled with each further one."
    )
    start_backoff_seconds_max: float = Field(default=30.0, gt=0, description="The longest such pause.")
    failed_rest_seconds: float = Field(
        default=300.0, gt=0, description="A resting engine is tried again after so long, or when an operator wakes it."
    )
    lease_seconds: float = Field(
        default=15.0, ge=1, description="After so long without a word from its owner, a unit may be another gateway's."
    )
    poll_interval_s: float = Field(
        default=0.5, gt=0, le=10, description="How often wishes and states of other processes are read."
    )
    rest_interval_s: float = Field(
        default=1.0, gt=0, le=60, description="How often it is looked which engines nobody uses."
    )
    close_seconds: float = Field(
        default=1.5,
        ge=0,
        description="How long other processes may take to see that a unit sleeps, before it is stopped.",
    )
    scaling_interval_s: float = Field(
        default=5.0, gt=0, le=60, description="How often it is decided how many units of a model are needed."
    )
    wished_replicas_max: int = Field(
        default=64,
        ge=1,
        description="Of a model whose engines something else starts: at most so many are wished, in metrics.",
    )

    def start_limits(self) -> StartLimits:
        return StartLimits(
            failures_max=self.start_failures_max,
            backoff_first_s=self.start_backoff_seconds,
            backoff_most_s=self.start_backoff_seconds_max,
            rest_s=self.failed_rest_seconds,
        )
