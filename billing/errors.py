"""What billing refuses.

BillingError
├── PriceUnavailable      no price row is in force for the model (503): absence is not zero
├── InsufficientCredits   the hold does not fit under the account's credit limit (402)
├── PriceConflict         a price row that contradicts another (409; console and CLI)
├── UsageNotFound         no such request in this account (404)
└── BillingUnavailable    the durable record can't be written, or the database does not answer (503)
"""


class BillingError(Exception):
    """Base of all billing errors: a stable public `code`, a public message, and when a retry may help."""

    code = "billing_error"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class PriceUnavailable(BillingError):
    code = "price_unavailable"


class InsufficientCredits(BillingError):
    code = "insufficient_credits"


class PriceConflict(BillingError):
    code = "price_conflict"


class UsageNotFound(BillingError):
    code = "request_not_found"


class BillingUnavailable(BillingError):
    code = "billing_unavailable"
