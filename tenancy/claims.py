"""The words of quotas and meters: what is counted, what a request claims of it, and how a counter stands.

Plain values, made by quotas.py and by the meters; errors and headers carry them.
"""

from enum import StrEnum

from tenancy.values import value

DAY_MS = 86_400_000


class Meter(StrEnum):
    """What is counted. Low cardinality: also the name in rate-limit headers and refusal codes."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    INPUT_TOKENS_PER_MINUTE = "input_tokens_per_minute"
    OUTPUT_TOKENS_PER_MINUTE = "output_tokens_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    REQUESTS_PER_DAY = "requests_per_day"
    TOKENS_PER_DAY = "tokens_per_day"
    NEURONS_PER_DAY = "neurons_per_day"
    CONCURRENCY = "concurrency"

    @property
    def daily(self) -> bool:
        return self.value.endswith("_per_day")

    @property
    def window_s(self) -> int:
        """What the limit is about, in seconds; 0 for requests at once."""
        return 0 if self is Meter.CONCURRENCY else DAY_MS // 1_000 if self.daily else 60


@value
class Claim:
    """One counter that a request takes from. name: unique among the account's. limit: None only counts.

    bucket_ms, buckets: the counter's window; 0 for leases.
    """

    meter: Meter
    name: str
    amount: int
    limit: int | None
    bucket_ms: int
    buckets: int


@value
class Standing:
    """A counter as one request left or found it. used in the meter's own unit (neurons: millionths).

    reset_ms: until all of it is usable again. wait_ms: until this claim would fit; 0: it fits; -1: it never can.
    """

    claim: Claim
    used: int
    reset_ms: int
    wait_ms: int = 0
