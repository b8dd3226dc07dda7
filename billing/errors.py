"""What billing refuses.

BillingError
├── PriceUnavailable      no price row is in force for the model (503): absence is not zero
├── InsufficientCredits   the hold does not fit under the account's credit limit or into its wallet (402)
├── BudgetExceeded        the hold does not fit into a hard budget's period (429; waiting a second does not help)
├── PriceConflict         a price row that contradicts another (409; console and CLI)
├── UsageQueryUnsupported  sums that are not kept apart (400)
├── UsageNotFound         no such request in this account (404)
├── TransactionNotFound   no such ledger transaction in this account (404)
├── InvoiceNotFound       no such invoice in this account (404)
├── BudgetNotFound        no such budget in this account (404)
├── ExportUnavailable     a format whose library is not installed (command line)
├── WebhookInvalid        a URL that webhooks can't go to (400)
├── WebhookNotFound       no such endpoint in this account (404)
├── LedgerConflict        a deed that the ledger can't book: already taken back, or more than is there (409)
├── IdempotencyMismatch   a key that was used for something else (422)
├── RequestRunning        the request of this idempotency key has not ended (409)
├── AnswerNotKept         it has ended, and its answer can't be given again (409)
└── BillingUnavailable    the durable record can't be written, or the database does not answer (503)
    └── RecordDelayed     of a request that has run: its record is kept, and written later
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
    """left_nano: what could be held."""

    code = "insufficient_credits"

    def __init__(self, message: str, *, left_nano: int = 0, retry_after_s: int | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.left_nano = left_nano


class BudgetExceeded(BillingError):
    """budget_id, period_start_ns: the budget and the period that can't bear the hold. left_nano: what it could."""

    code = "budget_exceeded"

    def __init__(self, message: str, *, budget_id: str = "", period_start_ns: int = 0, left_nano: int = 0) -> None:
        super().__init__(message)
        self.budget_id = budget_id
        self.period_start_ns = period_start_ns
        self.left_nano = left_nano


class PriceConflict(BillingError):
    code = "price_conflict"


class UsageQueryUnsupported(BillingError):
    code = "usage_query_unsupported"


class UsageNotFound(BillingError):
    code = "request_not_found"


class TransactionNotFound(BillingError):
    code = "transaction_not_found"


class InvoiceNotFound(BillingError):
    code = "invoice_not_found"


class BudgetNotFound(BillingError):
    code = "budget_not_found"


class ExportUnavailable(BillingError):
    code = "export_unavailable"


class WebhookInvalid(BillingError):
    code = "webhook_invalid"


class WebhookNotFound(BillingError):
    code = "webhook_not_found"


class LedgerConflict(BillingError):
    code = "ledger_conflict"


class IdempotencyMismatch(BillingError):
    code = "idempotency_key_reused"


class RequestRunning(BillingError):
    code = "request_in_progress"


class AnswerNotKept(BillingError):
    code = "answer_not_kept"


class BillingUnavailable(BillingError):
    code = "billing_unavailable"


class RecordDelayed(BillingUnavailable):
    """The request has run and will be charged: to run it again would charge it twice."""

    code = "record_delayed"

    def __init__(self) -> None:
        super().__init__(
            "The request has run and is charged once its usage record can be written, which it can't be now. "
            "Sent again, it is charged again."
        )
