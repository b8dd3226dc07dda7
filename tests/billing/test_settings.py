"""Defaults hold, and values out of range are refused by name."""

import pytest
from pydantic import ValidationError

from billing.settings import BillingSettings
from tenancy.settings import TenancySettings


def test_defaults_are_in_range() -> None:
    assert BillingSettings().drain_interval_s <= 0.2
    assert TenancySettings().key_cache_ttl_s < 1  # a revocation works within a second


@pytest.mark.parametrize(
    "values",
    [
        {"drain_interval_s": 0},
        {"spool_segment_bytes_max": 1},
        {"spool_high_water_bytes": 64 * 1024 * 1024},  # less than two segments
        {"spool_high_watr_bytes": 2**30},
    ],
)
def test_what_can_not_work_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        BillingSettings.model_validate(values)


@pytest.mark.parametrize("values", [{"key_cache_ttl_s": 1.0}, {"key_cache_entries_max": 0}, {"key_cache_ttl": 0.5}])
def test_a_cache_that_breaks_the_promise_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        TenancySettings.model_validate(values)
