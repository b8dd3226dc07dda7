"""What can be set about keys, their cache and meters. Nested by api/settings.py, which alone reads the environment."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class TenancySettings(BaseModel):
    """Read by api/settings.py from `PAGEGATE_TENANCY__*` or the TOML table `[tenancy]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # A revocation by another process must work within a second, so the cache may not reach one.
    key_cache_ttl_s: float = Field(
        default=0.8, gt=0, le=0.9, description="A checked key is believed this long without a word from the database."
    )
    key_cache_watched_s_max: float = Field(
        default=60, gt=0, le=3600, description="A key to which nothing was done is looked up this often all the same."
    )
    unknown_key_cache_ttl_s: float = Field(
        default=0.8, gt=0, le=0.9, description="A key that does not exist is refused this long without asking again."
    )
    key_cache_stale_s_max: float = Field(
        default=30, ge=0, le=300, description="Known keys go on working this long while the database is away."
    )
    key_cache_entries_max: int = Field(
        default=10_000, ge=1, le=1_000_000, description="Keys in the cache; as many unknown ones beside them."
    )
    database_busy_timeout_s: float = Field(
        default=5, gt=0, le=10, description="How long a write waits for another process's write (SQLite)."
    )
    key_use_interval_s: float = Field(
        default=10, gt=0, le=3600, description="How often the last use of keys is written down."
    )
    # Below the time that a key is believed, so that keys are confirmed by it; messages only make it sooner.
    deeds_interval_s: float = Field(
        default=0.4, gt=0, le=0.8, description="How soon a revocation, suspension or switch is noticed without Redis."
    )
    secret_scanning_keys: Path | None = Field(
        default=None, description="Public keys of a secret scanner whose reports revoke keys, as GitHub publishes them."
    )
    meters_processes: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Processes that share the meters: without their server each has a share.",
    )
    meters_timeout_s: float = Field(
        default=0.08, gt=0, le=1, description="The most that a meters' server in trouble adds to a request, once."
    )
    meters_lease_s: float = Field(
        default=60, ge=3, le=3600, description="After this long the slots of a process that died are free."
    )
    meters_probe_interval_s: float = Field(
        default=0.5, gt=0, le=4, description="How often a meters' server that is away is looked for."
    )
