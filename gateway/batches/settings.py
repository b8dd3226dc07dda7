"""Bounds of files and batches: how large, how many, how long they are kept, and how idle an engine must be."""

from pydantic import BaseModel, ConfigDict, Field


class BatchSettings(BaseModel):
    """Read by api/settings.py from `PAGEGATE_BATCHES__*` or the TOML table `[batches]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    file_bytes_max: int = Field(default=64 << 20, ge=1024, description="The largest file of requests.")
    account_bytes_max: int = Field(
        default=1 << 30, ge=1024, description="Bytes of uploaded files that one account may have at a time."
    )
    account_files_max: int = Field(default=10_000, ge=1, description="Files that one account may have at a time.")
    lines_max: int = Field(default=50_000, ge=1, le=50_000, description="Requests of one batch.")
    account_batches_max: int = Field(default=100, ge=1, description="Batches of one account that have not ended.")
    account_lines_max: int = Field(
        default=1_000_000,
        ge=1,
        description="Requests in all batches that are kept of one account, beyond which it begins no other one.",
    )
    account_batch_bytes_max: int = Field(
        default=4 << 30,
        ge=1024,
        description="Bytes of what the requests in an account's batches ask and what they came to, while it is kept: "
        "beyond them no batch is made, and what has not begun of the others ends.",
    )
    window_seconds: int = Field(
        default=86_400, ge=60, le=7 * 86_400, description="What has not begun so long after its batch was made expires."
    )
    file_kept_seconds: int = Field(
        default=30 * 86_400, ge=3_600, description="Files are deleted so long after their upload unless they say when."
    )
    answers_kept_seconds: int = Field(
        default=86_400, ge=60, description="Answers of Workers AI's batches are deleted so long after their end."
    )
    at_once_max: int = Field(
        default=8, ge=1, le=256, description="Lines that run at a time in this process, per model."
    )
    idle_share: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="Of some replica's pages so many must be free, with nobody waiting, before a line begins.",
    )
    attempts_max: int = Field(
        default=3,
        ge=1,
        le=10,
        description="Times that a line is tried while engines fail before they produce anything.",
    )
    lease_seconds: float = Field(
        default=30.0,
        ge=3,
        description="After so long without a word from its process another one goes on with a batch.",
    )
    missing_seconds_max: float = Field(
        default=1_800.0,
        ge=1,
        description="After so long a line is given up whose process is silent and of which no usage record tells.",
    )
