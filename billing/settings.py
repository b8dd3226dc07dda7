"""What can be set about durable records and prices. Nested by api/settings.py, which alone reads the environment."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from billing.webhooks.addresses import AllowedAddresses
from tenancy.networks import Networks

_MIB = 1024 * 1024


class BillingSettings(BaseModel):
    """Read by api/settings.py from `PAGEGATE_BILLING__*` or the TOML table `[billing]`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    spool_segment_bytes_max: int = Field(
        default=64 * _MIB, ge=64 * 1024, le=1024 * _MIB, description="Size of one file of the durable record."
    )
    spool_high_water_bytes: int = Field(
        default=1024 * _MIB,
        ge=256 * 1024,
        le=1024 * 1024 * _MIB,
        description="Records that wait for the database, about 1 KiB a request: beyond this billable work is refused.",
    )
    drain_interval_s: float = Field(
        default=0.2, gt=0, le=10, description="How often ended requests are posted to the database."
    )
    drain_batch_records_max: int = Field(
        default=500, ge=1, le=5_000, description="Ended requests posted in one transaction."
    )
    price_refresh_interval_s: float = Field(
        default=1, gt=0, le=2, description="How often prices are read; a new price takes effect two seconds later."
    )

    funds_refresh_interval_s: float = Field(
        default=1, gt=0, le=10, description="How soon top-ups, grants, modes and budgets that were changed are noticed."
    )

    kept_answer_seconds: int = Field(
        default=86_400, ge=60, le=7 * 86_400, description="How long an answer is kept for a repeated Idempotency-Key."
    )
    kept_answer_bytes_max: int = Field(
        default=256 * 1024, ge=0, le=16 * _MIB, description="A larger answer is not kept: a repeated key is told so."
    )
    kept_keys_per_account_max: int = Field(
        default=10_000, ge=1, le=1_000_000, description="Beyond this many keys an account's oldest are forgotten."
    )

    kept_bytes_per_account_max: int = Field(
        default=512 * _MIB,
        ge=16 * _MIB,
        description="Beyond so many bytes an account's oldest answers are not kept: a repeated key is told so.",
    )

    webhook_networks: Networks = Field(
        default=(), description="Private networks that webhooks may go to beside the public Internet, comma-separated."
    )
    webhook_authorities: Path | None = Field(
        default=None, description="PEM file of certificate authorities that vouch for receivers beside the public ones."
    )
    invoice_seller: str = Field(
        default="Pagegate", min_length=1, max_length=500, description="Name and address that head invoices, some lines."
    )
    invoice_after_hours: int | None = Field(
        default=None,
        ge=1,
        le=24 * 28,
        description="Close a month and write its invoices so long after its end; by default the operator does so.",
    )

    def webhook_addresses(self) -> AllowedAddresses:
        return AllowedAddresses(self.webhook_networks)

    @model_validator(mode="after")
    def _high_water_leaves_room_to_rotate(self) -> Self:
        if self.spool_high_water_bytes < 2 * self.spool_segment_bytes_max:
            raise ValueError("spool_high_water_bytes must be at least twice spool_segment_bytes_max")
        return self
