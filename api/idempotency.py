"""The Idempotency-Key header of the generating routes: a request that is sent again is answered again, not run again.

Called by the dialects once they hold a GenerationRequest. Without the header nothing here runs: two requests are two
charges. A stream is not kept: a repeated one is told the first one's id.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, Final, Protocol

import orjson
import structlog
from starlette.requests import Request
from starlette.responses import Response

from api.departure import ClientGone, watch_for_departure
from api.errors import IdempotencyKeyInvalid
from api.refusals import FORESEEN
from api.sent_headers import sent_headers
from api.services import Services
from api.sse import EventStream
from billing.errors import BillingError, RecordDelayed
from billing.kept_answers import KeptAnswer
from gateway.errors import GenerationCutOff
from tenancy.errors import TenancyError
from tenancy.principal import Principal

_KEY: Final = re.compile(r"[!-~](?:[ -~]{0,253}[!-~])?", re.ASCII)
# They are about one exchange and its moment; everything else of an answer is the same when it is given again.
_NOT_KEPT: Final = ("content-length", "ratelimit", "x-ratelimit-")
_NOTHING: Final[Mapping[str, Any]] = {}

log = structlog.get_logger(__name__)


class Wanted(Protocol):
    """What is known of a request here, whatever it is for."""

    @property
    def id(self) -> str: ...
    @property
    def principal(self) -> Principal: ...
    @property
    def stream(self) -> bool: ...
    def asked(self) -> dict[str, Any]: ...


def idempotency_key(request: Request) -> str | None:
    """Raises IdempotencyKeyInvalid: a key that can't be honoured must not be ignored."""
    found = sent_headers(request.scope).get(b"idempotency-key")
    if found is None:
        return None
    key = str(found[0], "latin-1")
    if len(found) > 1 or _KEY.fullmatch(key) is None:
        raise IdempotencyKeyInvalid
    return key


def answered(
    request: Request,
    services: Services,
    wanted: Wanted,
    answer: Callable[[AbstractAsyncContextManager[object]], Awaitable[Response]],
    *,
    besides: Mapping[str, Any] = _NOTHING,
) -> Awaitable[Response]:
    """Run `answer`, once for each Idempotency-Key where there is one; what a generating route ends with.

    besides: what the dialect alone knows that tells two requests apart; what is None was not asked. answer takes the
    watch around its wait for the gateway, which cancels the work if the client leaves. With a key a whole answer is not
    given up: a client that comes back finds it finished.
    """
    key = idempotency_key(request)
    if key is None:
        return answer(watch_for_departure(request))
    watch = watch_for_departure(request) if wanted.stream else nullcontext()
    return _once(key, _fingerprint(request, wanted, besides), services, wanted, partial(answer, watch))


async def _once(
    key: str,
    fingerprint: str,
    services: Services,
    wanted: Wanted,
    answer: Callable[[], Awaitable[Response]],
) -> Response:
    """Run `answer` unless the account has sent this key before."""
    kept, call = services.kept_answers, services.database.call
    mine = (wanted.principal.account_id, key)
    found = await call(kept.begin, *mine, fingerprint, wanted.id)
    if found is not None:
        return Response(found.body, found.status, headers={**found.headers, "idempotent-replayed": "true"})
    try:
        response = await answer()
    except (asyncio.CancelledError, ClientGone, RecordDelayed, GenerationCutOff):
        await _noted(call(kept.end, *mine, wanted.id))
        raise
    except FORESEEN:
        await _noted(call(kept.forget, *mine, wanted.id))
        raise
    except Exception:
        await _noted(call(kept.end, *mine, wanted.id))
        raise
    if isinstance(response, EventStream):
        await _noted(call(kept.end, *mine, wanted.id))
    else:
        headers = {name: value for name, value in response.headers.items() if not name.startswith(_NOT_KEPT)}
        body = bytes(response.body)
        await _noted(call(kept.keep, *mine, wanted.id, KeptAnswer(response.status_code, headers, body)))
    return response


async def _noted(call: Awaitable[object]) -> None:
    """What can't be noted now is no reason to withhold an answer; the key then counts as running."""
    try:
        await call
    except (TenancyError, BillingError) as error:
        log.warning("idempotency key not noted", error=str(error))


def _fingerprint(request: Request, wanted: Wanted, besides: Mapping[str, Any]) -> str:
    """What makes two requests the same: the route, and all that the body asks for."""
    told = {name: value for name, value in besides.items() if value is not None}
    asked = {"path": request.scope["path"], **wanted.asked(), **told}
    return hashlib.sha256(orjson.dumps(asked, default=dict, option=orjson.OPT_SORT_KEYS)).hexdigest()
