"""Which errors a route can end in, as responses of the document: statuses, codes and bodies, read from the one table.

A group names classes of api/errors.py's table; a class stands for its subclasses too, unless they have rows of their
own and are left out. Nothing here is said by hand twice: an error that changes its row changes the document.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from api.errors import (
    INTERNAL,
    ROWS,
    AccountIdMalformed,
    BodyEncoded,
    BodyNotJson,
    BodyTooLarge,
    BodyTooSlow,
    IdempotencyKeyInvalid,
    InputInvalid,
    LoraUnsupported,
    Row,
    TokenInvalid,
)
from api.reference.shapes import COUNT, INTEGER, TEXT, Shape, listed, or_null, record
from api.refusals import Dialect
from backends.errors import BackendError, EngineTimeout
from billing.errors import (
    AnswerNotKept,
    BillingUnavailable,
    BudgetExceeded,
    IdempotencyMismatch,
    InsufficientCredits,
    PriceUnavailable,
    RecordDelayed,
    RequestRunning,
)
from gateway.errors import (
    AnswerTooLarge,
    Draining,
    EngineUnavailable,
    Evicted,
    FirstByteLate,
    GenerationFailed,
    ModelDisabled,
    ModelNameInvalid,
    ModelNotFound,
    ModelRetired,
    PromptInvalid,
    PromptTooLong,
    RegionNotServed,
    Rejected,
    RequestRefused,
    TaskMismatch,
)
from tenancy.claims import Meter
from tenancy.errors import (
    AccessDenied,
    AccountNotFound,
    AccountSuspended,
    KeyMissing,
    KeyRefused,
    ModelNotAllowed,
    NeuronsExceeded,
    ProjectArchived,
    QuotaExceeded,
    RateExceeded,
    RequestExceedsQuota,
    ScopeMissing,
    TenancyUnavailable,
)

Errors = tuple[type[Exception], ...]

# Of every route: what the outermost layer refuses before it knows which one is meant.
_ANYWHERE: Final[Errors] = (BodyTooLarge, BodyEncoded)
STORES: Final[Errors] = (TenancyUnavailable, BillingUnavailable, RecordDelayed)
KEY: Final[Errors] = (KeyMissing, KeyRefused, AccessDenied, AccountSuspended, ProjectArchived, TenancyUnavailable)
PATH: Final[Errors] = (AccountIdMalformed,)
QUERY: Final[Errors] = (InputInvalid,)
BODY: Final[Errors] = (InputInvalid, BodyNotJson, BodyTooSlow)
CONSOLE: Final[Errors] = (
    KeyMissing, KeyRefused, ScopeMissing, AccountNotFound, AccessDenied, AccountSuspended, ProjectArchived, *STORES,
)  # fmt: skip
VERIFY: Final[Errors] = (KeyMissing, TokenInvalid, AccessDenied, TenancyUnavailable)
IDEMPOTENCY: Final[Errors] = (IdempotencyKeyInvalid, IdempotencyMismatch, RequestRunning, AnswerNotKept)
RUNNING: Final[Errors] = (
    *KEY, *BODY, *IDEMPOTENCY, *STORES, ModelNotFound, ModelNameInvalid, ModelRetired, ModelDisabled, ModelNotAllowed,
    TaskMismatch, AnswerTooLarge,
    PromptTooLong, RequestRefused, QuotaExceeded, NeuronsExceeded, RequestExceedsQuota, InsufficientCredits,
    BudgetExceeded, PriceUnavailable, Rejected, Draining, Evicted, FirstByteLate, EngineUnavailable, GenerationFailed,
    RegionNotServed, BackendError, EngineTimeout,
)  # fmt: skip
GENERATION: Final[Errors] = (*RUNNING, PromptInvalid, LoraUnsupported)

_DIALECT_BODIES: Final = {
    Dialect.OPENAI: "OpenAIError",
    Dialect.WORKERS_AI: "EnvelopeError",
    Dialect.CONSOLE: "Problem",
}
_MEDIA: Final = {Dialect.CONSOLE: "application/problem+json"}
_ENVELOPE: Final[dict[str, Shape]] = {
    "result": {"type": "null"},
    "success": {"const": False},
    "errors": {**listed(record(code=INTEGER, message=TEXT)), "minItems": 1},
    "messages": listed({"type": "object"}),
}
ERROR_SCHEMAS: Final[dict[str, Shape]] = {
    "EnvelopeError": record(**_ENVELOPE),
    "OpenAIError": record(
        error=record(message=TEXT, type=TEXT, param=or_null(TEXT), code=TEXT),
        **_ENVELOPE,
    ),
    "Problem": record(type=TEXT, title=TEXT, status=COUNT, detail=TEXT, code=TEXT, request_id=TEXT),
}


def error_responses(errors: Errors, dialect: Dialect) -> dict[str, Any]:
    """Responses by status; each lists the codes that stand for it, and whether a retry can help."""
    told: dict[int, list[tuple[str, Row]]] = {}
    for code, row in _codes((*_ANYWHERE, *errors)):
        status = row.status
        if dialect is Dialect.WORKERS_AI and row.workers_status is not None:
            status = row.workers_status
        told.setdefault(status, []).append((code, row))
    return {str(status): _response(told[status], dialect) for status in sorted(told)}


def _codes(errors: Errors) -> Iterator[tuple[str, Row]]:
    """Each error's own code and, where its row is shared, those of the classes below it."""
    yield "internal_error", INTERNAL
    for kind in dict.fromkeys(errors):
        row = next(ROWS[one] for one in kind.__mro__ if one in ROWS)
        for said in dict.fromkeys(_below(kind)) if row.shared else (kind,):
            for code in _said(said):
                yield code, row
        if kind is GenerationFailed:
            yield GenerationFailed.code, ROWS[EngineTimeout]  # where the engine only kept silent


def _said(kind: type[Exception]) -> Iterator[str]:
    if kind is RateExceeded:  # names the meter that is full
        yield from (f"{meter}_exceeded" for meter in Meter if meter is not Meter.CONCURRENCY)
    else:
        yield str(kind.code)  # type: ignore[attr-defined]  # every class of the table has a code


def _below(kind: type[Exception]) -> Iterable[type[Exception]]:
    yield kind
    for lower in kind.__subclasses__():
        if lower not in ROWS:
            yield from _below(lower)


def _response(told: list[tuple[str, Row]], dialect: Dialect) -> dict[str, Any]:
    codes = dict(sorted(told, key=lambda one: one[0]))
    lines = [_line(code, row, dialect) for code, row in codes.items()]
    headers = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    if any(not row.hopeless and row.retry_after_s is not None for row in codes.values()):
        headers["retry-after"] = {"$ref": "#/components/headers/RetryAfter"}
    if any(row.hopeless for row in codes.values()):
        headers["x-should-retry"] = {"$ref": "#/components/headers/ShouldRetry"}
    return {
        "description": "\n".join(lines),
        "headers": headers,
        "content": {
            _MEDIA.get(dialect, "application/json"): {
                "schema": {
                    "allOf": [{"$ref": f"#/components/schemas/{_DIALECT_BODIES[dialect]}"}, _narrowed(codes, dialect)]
                }
            }
        },
    }


def _line(code: str, row: Row, dialect: Dialect) -> str:
    number = f" ({row.number})" if row.number and dialect is not Dialect.CONSOLE else ""
    hope = "; the same request can't succeed later" if row.hopeless else ""
    return f"- `{code}`{number}{hope}"


def _narrowed(codes: dict[str, Row], dialect: Dialect) -> Shape:
    """The codes that this status can carry."""
    names: Shape = {"properties": {"code": {"enum": list(codes)}}}
    numbers = {"properties": {"code": {"enum": sorted({row.number for row in codes.values()})}}}
    match dialect:
        case Dialect.CONSOLE:
            return names
        case Dialect.WORKERS_AI:
            return {"properties": {"errors": {"items": numbers}}}
        case Dialect.OPENAI:
            return {"properties": {"error": names, "errors": {"items": numbers}}}
