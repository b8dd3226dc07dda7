"""What can be set about keys and their cache. Nested by api/settings.py, which alone reads the environment."""

from pydantic import BaseModel, ConfigDict, Field


class TenancySettings(BaseModel):
    """Read by api/settings.py from `PAGEGATE_TENANCY__*` or the TOML table `[tenancy]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # A revocation by another process must work within a second, so the cache may not reach one.
    key_cache_ttl_s: float = Field(
        default=0.8, gt=0, le=0.9, description="A checked key is believed this long without asking the database."
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
