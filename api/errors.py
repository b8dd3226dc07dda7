"""The one table: error class → status, type and code in each dialect, and whether a retry helps.

Routes raise; api/refusals.py renders what this table says. Domain errors know no HTTP, so this is the only place where
they meet it. A test walks the subclasses of every base and fails on one without a row.

    ApiError                    what HTTP itself brings in
    ├── InputInvalid            a body field or query parameter: carries its path
    │   └── ParameterUnsupported   understood, but not served here
    ├── BodyNotJson             empty, not JSON, not an object, or too deep
    ├── BodyTooLarge  BodyTooSlow  BodyEncoded
    ├── LoraUnsupported
    ├── SignatureInvalid        of a secret scanner's report
    ├── TokenInvalid            the verify routes' own words for a refused key
    ├── RouteUnknown  MethodNotAllowed
    ├── IdempotencyKeyInvalid
    ├── SignInNeeded  PageUnknown  FormForeign  FormTooLarge  FormInvalid  LiveViewersTooMany   of the dashboard
    └── AccountIdMalformed
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from backends.errors import BackendError, EngineTimeout
from billing.errors import (
    AnswerNotKept,
    BillingUnavailable,
    BudgetExceeded,
    BudgetNotFound,
    ExportUnavailable,
    IdempotencyMismatch,
    InsufficientCredits,
    InvoiceNotFound,
    LedgerConflict,
    PriceConflict,
    PriceUnavailable,
    RecordDelayed,
    RequestRunning,
    TransactionNotFound,
    UsageNotFound,
    UsageQueryUnsupported,
    WebhookInvalid,
    WebhookNotFound,
)
from gateway.errors import (
    AnswerTooLarge,
    AnswerUnknown,
    BatchesFull,
    BatchInvalid,
    BatchNotCancellable,
    BatchNotFound,
    Draining,
    EngineUnavailable,
    Evicted,
    FirstByteLate,
    GenerationFailed,
    ModelDisabled,
    ModelNameInvalid,
    ModelNotFound,
    ModelRetired,
    ModelWarming,
    PromptInvalid,
    PromptTooLong,
    RegionNotServed,
    Rejected,
    ReplicaNotFound,
    RequestRefused,
    RolloutNotFound,
    RolloutRefused,
    StoredFileInvalid,
    StoredFileNotFound,
    StoredFilesFull,
    TaskMismatch,
)
from tenancy.errors import (
    AccessDenied,
    AccountNotFound,
    AccountSuspended,
    CopyRefused,
    KeyMissing,
    KeyNotFound,
    KeyRefused,
    LinkInvalid,
    MemberNotFound,
    MembershipConflict,
    ModelNotAllowed,
    NameTaken,
    NeuronsExceeded,
    ProjectArchived,
    ProjectNotFound,
    QuotaExceeded,
    QuotaNotFound,
    RequestExceedsQuota,
    RightMissing,
    ServiceAccountNotFound,
    SignInRefused,
    SignInThrottled,
    TenancyUnavailable,
    TextUnstorable,
    UserNotFound,
    WallRefused,
)


class ApiError(Exception):
    """Base of what HTTP brings in: a stable public `code`, a public message, and the parameter at fault, if any."""

    code = "invalid_request"
    param: str | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InputInvalid(ApiError):
    """path: keys and indexes from the top of the body to what is wrong. reason: a sentence without the value itself."""

    code = "invalid_parameter"

    def __init__(self, path: Sequence[str | int], reason: str) -> None:
        pointer = "/" + "/".join(str(step) for step in path)
        super().__init__(f"Invalid value at '{pointer}': {reason}")
        self.path = tuple(path)
        self.param = dotted(path) or None


class ParameterUnsupported(InputInvalid):
    code = "unsupported_parameter"


class BodyNotJson(ApiError):
    code = "invalid_json"


class BodyTooLarge(ApiError):
    code = "request_too_large"

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"The request body is larger than {bytes_max} bytes.")


class BodyTooSlow(ApiError):
    code = "request_timeout"

    def __init__(self, seconds_max: float) -> None:
        super().__init__(f"The request body did not arrive within {seconds_max:g} seconds.")


class BodyEncoded(ApiError):
    code = "unsupported_content_encoding"

    def __init__(self) -> None:
        super().__init__("Compressed request bodies are not served: send the JSON itself, without Content-Encoding.")


class LoraUnsupported(ApiError):
    code = "lora_unsupported"
    param = "lora"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model} does not support LoRA inference.")


class SignatureInvalid(ApiError):
    code = "invalid_signature"

    def __init__(self) -> None:
        super().__init__("The body's signature is missing or not one of a known key.")


class TokenInvalid(ApiError):
    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("Invalid API Token")


class RouteUnknown(ApiError):
    code = "unknown_route"

    def __init__(self) -> None:
        super().__init__("No route for that URI")


class MethodNotAllowed(ApiError):
    code = "method_not_allowed"

    def __init__(self, method: str, allow: str) -> None:
        super().__init__(f"{method[:16]} not supported for requested URI.")
        self.allow = allow


class IdempotencyKeyInvalid(ApiError):
    code = "invalid_idempotency_key"

    def __init__(self) -> None:
        super().__init__("Idempotency-Key is sent once, as 1 to 255 printable ASCII characters.")


class AccountIdMalformed(ApiError):
    code = "malformed_account_id"

    def __init__(self) -> None:
        super().__init__(
            "Could not route to this URI: the account id must be 32 lower-case hexadecimal characters.",
        )


class SignInNeeded(ApiError):
    """Of the dashboard: becomes a way to the sign-in page."""

    code = "sign_in_needed"

    def __init__(self) -> None:
        super().__init__("Sign in to see this page.")


class PageUnknown(ApiError):
    code = "page_unknown"

    def __init__(self) -> None:
        super().__init__("There is no such page, or it is not for you.")


class FormForeign(ApiError):
    """A form that no page of the visitor's session made, or that came from another site."""

    code = "form_foreign"

    def __init__(self) -> None:
        super().__init__("This form was not made by a page of your session. Go back, reload the page and try again.")


class FormTooLarge(ApiError):
    code = "form_too_large"

    def __init__(self) -> None:
        super().__init__("This form is larger than any of ours.")


class FormInvalid(ApiError):
    code = "form_invalid"


class LiveViewersTooMany(ApiError):
    code = "live_viewers_too_many"

    def __init__(self) -> None:
        super().__init__("Too many live pages are open at this moment. Close one, or try again later.")


def dotted(path: Sequence[str | int]) -> str:
    """A path as OpenAI writes its `param`: messages[1].content."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


@dataclass(frozen=True, slots=True)
class Row:
    """What one class of error becomes.

    status, type: OpenAI's dialect and the console. number: Workers AI's code (0: never seen there).
    workers_status: where Workers AI's status differs. says: the public text in place of the error's own message.
    retry_after_s: sent when the error carries none of its own; None sends no Retry-After. hopeless: the same request
    can't succeed later, and `x-should-retry: false` says so. shared: subclasses may do without a row of their own.
    param: of OpenAI's dialect, where the error itself names none.
    """

    status: int
    type: str
    number: int
    workers_status: int | None = None
    says: str | None = None
    retry_after_s: int | None = None
    hopeless: bool = False
    shared: bool = False
    param: str | None = None


_INVALID: Final = "invalid_request_error"
_ENGINE_SAYS: Final = "The model's engine failed while serving this request. You are not charged for it."

INTERNAL: Final = Row(500, "server_error", 3043, says="Internal server error.")

ROWS: Final[dict[type[Exception], Row]] = {
    # What HTTP itself brings in.
    InputInvalid: Row(400, _INVALID, 5006, shared=True),
    IdempotencyKeyInvalid: Row(400, _INVALID, 5006),
    BodyNotJson: Row(400, _INVALID, 3003),  # "Request is missing headers or body": the nearest documented code
    BodyTooLarge: Row(413, _INVALID, 3006),
    BodyEncoded: Row(415, _INVALID, 3003),
    BodyTooSlow: Row(408, _INVALID, 3007, retry_after_s=1),
    LoraUnsupported: Row(400, _INVALID, 5005, workers_status=405),
    TokenInvalid: Row(401, "authentication_error", 1000),
    RouteUnknown: Row(404, _INVALID, 7000, workers_status=400),
    MethodNotAllowed: Row(405, _INVALID, 7001),
    SignInNeeded: Row(401, "authentication_error", 0),
    PageUnknown: Row(404, _INVALID, 0),
    SignatureInvalid: Row(401, "authentication_error", 0),
    FormForeign: Row(403, "permission_error", 0),
    FormTooLarge: Row(413, _INVALID, 0),
    FormInvalid: Row(400, _INVALID, 0),
    LiveViewersTooMany: Row(503, "server_error", 0, retry_after_s=30),
    AccountIdMalformed: Row(404, _INVALID, 7003),
    # Who is asking. One row for every way a key can be refused: the code tells them apart.
    KeyRefused: Row(401, "authentication_error", 10000, shared=True),
    KeyMissing: Row(401, "authentication_error", 9106, workers_status=400),
    # Foreign and unknown accounts and missing scopes alike, so that existence stays a secret.
    AccessDenied: Row(403, "permission_error", 10000, shared=True),
    ModelNotAllowed: Row(403, "permission_error", 5018, param="model"),
    AccountSuspended: Row(403, "permission_error", 3023),
    ProjectArchived: Row(403, "permission_error", 3023),
    AccountNotFound: Row(404, _INVALID, 0),
    KeyNotFound: Row(404, _INVALID, 0),
    ProjectNotFound: Row(404, _INVALID, 0),
    ServiceAccountNotFound: Row(404, _INVALID, 0),
    QuotaNotFound: Row(404, _INVALID, 0),
    UserNotFound: Row(404, _INVALID, 0),
    MemberNotFound: Row(404, _INVALID, 0),
    LinkInvalid: Row(404, _INVALID, 0),
    NameTaken: Row(409, _INVALID, 0),
    CopyRefused: Row(409, _INVALID, 0),
    WallRefused: Row(409, _INVALID, 0),
    MembershipConflict: Row(409, _INVALID, 0),
    RightMissing: Row(403, "permission_error", 0),
    SignInRefused: Row(401, "authentication_error", 0),
    SignInThrottled: Row(429, "rate_limit_error", 0, retry_after_s=5),
    # Limits. Workers AI's clients retry 3021; 3036 is its "account limited", which they don't.
    QuotaExceeded: Row(429, "rate_limit_error", 3021, retry_after_s=1, shared=True),
    NeuronsExceeded: Row(429, "insufficient_quota", 3036, hopeless=True),
    RequestExceedsQuota: Row(429, "rate_limit_error", 3021, hopeless=True),
    TextUnstorable: Row(400, _INVALID, 5006, hopeless=True),
    TenancyUnavailable: Row(503, "server_error", 7009, retry_after_s=1),
    # Money. 3036 is Workers AI's "account limited" and 2045 its spend limit, which its clients don't retry.
    InsufficientCredits: Row(402, "insufficient_quota", 3036, hopeless=True),
    PriceUnavailable: Row(503, "server_error", 7009, hopeless=True),
    # A period's end may be weeks away: a client that tried again would only be refused again.
    BudgetExceeded: Row(429, "insufficient_quota", 2045, hopeless=True),
    PriceConflict: Row(409, _INVALID, 0),
    LedgerConflict: Row(409, _INVALID, 0),
    IdempotencyMismatch: Row(422, _INVALID, 5006, hopeless=True),
    RequestRunning: Row(409, _INVALID, 5006, retry_after_s=1),
    AnswerNotKept: Row(409, _INVALID, 5006, hopeless=True),
    UsageNotFound: Row(404, _INVALID, 0),
    UsageQueryUnsupported: Row(400, _INVALID, 0),
    TransactionNotFound: Row(404, _INVALID, 0),
    InvoiceNotFound: Row(404, _INVALID, 0),
    BudgetNotFound: Row(404, _INVALID, 0),
    ExportUnavailable: Row(501, "server_error", 0, hopeless=True),
    WebhookInvalid: Row(400, _INVALID, 0),
    WebhookNotFound: Row(404, _INVALID, 0),
    BillingUnavailable: Row(503, "server_error", 7009, retry_after_s=1),
    RecordDelayed: Row(503, "server_error", 7009, hopeless=True),
    # The gateway.
    ModelNotFound: Row(404, _INVALID, 5007, workers_status=400, param="model"),
    ModelNameInvalid: Row(404, _INVALID, 3042, param="model"),
    ModelRetired: Row(410, _INVALID, 5028, hopeless=True, param="model"),
    ModelDisabled: Row(503, "server_error", 3040, retry_after_s=60, param="model"),
    ReplicaNotFound: Row(404, _INVALID, 0),
    RolloutNotFound: Row(404, _INVALID, 0),
    RolloutRefused: Row(409, _INVALID, 0, hopeless=True),
    TaskMismatch: Row(400, _INVALID, 5006, hopeless=True),
    PromptInvalid: Row(400, _INVALID, 5006),
    RequestRefused: Row(400, _INVALID, 5006, hopeless=True),
    AnswerTooLarge: Row(400, _INVALID, 5006, hopeless=True, param="top_logprobs"),
    PromptTooLong: Row(400, _INVALID, 5021, workers_status=413, hopeless=True),
    Rejected: Row(429, "rate_limit_error", 3040, retry_after_s=1, shared=True),
    ModelWarming: Row(503, "server_error", 3040, retry_after_s=10, param="model"),
    Draining: Row(503, "server_error", 7009, retry_after_s=1),
    Evicted: Row(429, "rate_limit_error", 3040, retry_after_s=1),
    AnswerUnknown: Row(404, _INVALID, 5006, hopeless=True, param="previous_response_id"),
    FirstByteLate: Row(504, "server_error", 2014, workers_status=408, retry_after_s=1),
    RegionNotServed: Row(403, "permission_error", 5018, hopeless=True, param="model"),
    EngineUnavailable: Row(503, "server_error", 7009, retry_after_s=1),
    GenerationFailed: Row(502, "server_error", 3043, retry_after_s=1, shared=True),
    # Files and batches.
    StoredFileNotFound: Row(404, _INVALID, 5006, hopeless=True, param="id"),
    StoredFileInvalid: Row(400, _INVALID, 5006, hopeless=True),
    StoredFilesFull: Row(400, _INVALID, 5006, hopeless=True),
    BatchNotFound: Row(404, _INVALID, 5006, hopeless=True, param="id"),
    BatchInvalid: Row(400, _INVALID, 5006, hopeless=True),
    BatchesFull: Row(429, "rate_limit_error", 3040, retry_after_s=60),
    BatchNotCancellable: Row(409, _INVALID, 5006, hopeless=True),
    # Engines. Their messages are for the log.
    BackendError: Row(502, "server_error", 3043, says=_ENGINE_SAYS, retry_after_s=1, shared=True),
    EngineTimeout: Row(504, "server_error", 3046, workers_status=408, says="Request timeout.", retry_after_s=1),
}


def row_of(error: Exception) -> Row:
    """The row of the nearest class that has one; an error nobody foresaw is a bug of ours.

    A failed generation whose engine timed out is said as a timeout: that is what the caller saw.
    """
    if isinstance(error, GenerationFailed) and isinstance(error.__cause__, EngineTimeout):
        return ROWS[EngineTimeout]
    for kind in type(error).__mro__:
        if kind in ROWS:
            return ROWS[kind]
    return INTERNAL
