"""Renders an error into the body of the route's dialect: OpenAI's with the Workers AI fields beside it, Workers AI's
envelope, or problem+json. Called by the exception handlers of app.py, the middleware and sse.py.

Which dialect a route speaks is read from its path, so that errors raised before any route was found speak it too.
"""

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.errors import INTERNAL, ApiError, BodyEncoded, BodyTooSlow, MethodNotAllowed, Row, row_of
from api.rate_limit_headers import rate_limit_headers
from backends.errors import BackendError
from billing.errors import BillingError
from gateway.errors import GatewayError
from tenancy.errors import QuotaExceeded, TenancyError
from tenancy.keys import without_keys

# Everything that may be told to a client; anything else is a bug of ours and says nothing.
FORESEEN: Final = (ApiError, TenancyError, BillingError, GatewayError, BackendError)


class Dialect(Enum):
    OPENAI = "openai"
    WORKERS_AI = "workers_ai"
    CONSOLE = "console"


_OPENAI_PATH: Final = re.compile(r"/v1(/|$)|/client/v4/accounts/[^/]*/ai/v1(/|$)")


def dialect_of(path: str) -> Dialect:
    if _OPENAI_PATH.match(path):
        return Dialect.OPENAI
    return Dialect.WORKERS_AI if path.startswith("/client/v4") else Dialect.CONSOLE


def refusal(request: Request, error: Exception) -> Response:
    """The answer to a request that ended in `error`."""
    dialect = dialect_of(request.scope["path"])
    row = row_of(error) if isinstance(error, FORESEEN) else INTERNAL
    status = row.status
    if dialect is Dialect.WORKERS_AI and row.workers_status is not None:
        status = row.workers_status
    text = public_text(error, row, request_id=request.state.request_id)
    match dialect:
        case Dialect.OPENAI:
            body = openai_error(error, row, text)
        case Dialect.WORKERS_AI:
            body = envelope_error(row, text)
        case Dialect.CONSOLE:
            body = _problem(error, row, text, request_id=request.state.request_id)
    return Response(
        orjson.dumps(body),
        status,
        headers=_headers(error, row),
        media_type="application/problem+json" if dialect is Dialect.CONSOLE else "application/json",
    )


def openai_refusal(error: Exception, *, request_id: str) -> Response:
    """OpenAI's dialect whatever the path: the dashboard's playground speaks it too."""
    row = row_of(error)
    body = openai_error(error, row, public_text(error, row, request_id=request_id))
    return Response(orjson.dumps(body), row.status, headers=_headers(error, row), media_type="application/json")


def stream_error(error: Exception, *, request_id: str) -> bytes:
    """The last frame of a stream that failed after its first byte, where no status can change. For both dialects."""
    row = row_of(error)
    body = openai_error(error, row, public_text(error, row, request_id=request_id))
    return b"data: %b\n\n" % orjson.dumps(body)


def openai_error(error: Exception, row: Row, text: str) -> dict[str, Any]:
    """OpenAI's error object with the envelope's fields beside it: clients of either find what they look for."""
    return {
        "error": {
            "message": text,
            "type": row.type,
            "param": getattr(error, "param", None) or row.param,
            "code": _code(error),
        },
        **envelope_error(row, text),
    }


def envelope_error(row: Row, text: str) -> dict[str, Any]:
    return {"result": None, "success": False, "errors": [{"code": row.number, "message": text}], "messages": []}


def _problem(error: Exception, row: Row, text: str, *, request_id: str) -> dict[str, Any]:
    return {
        "type": "about:blank",
        "title": _code(error).replace("_", " "),
        "status": row.status,
        "detail": text,
        "code": _code(error),
        "request_id": request_id,
    }


def _code(error: Exception) -> str:
    return str(error.code) if isinstance(error, FORESEEN) else "internal_error"


def public_text(error: Exception, row: Row, *, request_id: str) -> str:
    """What a client is told of an error."""
    text = row.says if row.says is not None else without_keys(str(error))
    # For trouble of ours the request id is what an operator will ask for.
    return f"{text} Request id: {request_id}." if row.status >= 500 else text


def _headers(error: Exception, row: Row) -> Mapping[str, str]:
    headers: dict[str, str] = {}
    if row.hopeless:
        headers["x-should-retry"] = "false"
    else:
        wait_s = getattr(error, "retry_after_s", None) or row.retry_after_s
        if wait_s is not None:
            headers["retry-after"] = str(max(1, int(wait_s)))
    if isinstance(error, QuotaExceeded):
        headers |= rate_limit_headers(error.standings)
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allow
    if isinstance(error, BodyEncoded):
        headers["accept-encoding"] = "identity"
    if isinstance(error, BodyTooSlow):
        headers["connection"] = "close"  # the rest of the body may never come
    return headers
