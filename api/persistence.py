"""How often and how long a client wants a request tried: Cloudflare's gateway headers, and the models to fall back to.

    cf-aig-request-timeout   milliseconds to the first byte of an attempt's answer
    cf-aig-max-attempts      with each model, after engines' faults
    cf-aig-retry-delay       milliseconds before the second attempt with a model
    cf-aig-backoff           constant, linear or exponential: what becomes of the delay

Called by the generating routes in the gateway's place. The answer says what served it: `model`, and two headers; and
until when that model is served, where its end is planned.
"""

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Final

import uuid_utils
from starlette.requests import Request

from api.errors import InputInvalid
from api.retirement_headers import retirement_headers
from api.sent_headers import sent_headers
from api.services import Services
from gateway.attempts import ATTEMPTS_MAX, DELAY_S_MAX, ONCE, Answer, Attempts, Backoff, Persistence, Served
from gateway.catalogue import TEXT_GENERATION
from gateway.request import Completion, GenerationRequest
from gateway.stream import Stream

TIMEOUT_MS_MAX: Final = 600_000
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_ASKING: Final = frozenset(
    {b"cf-aig-request-timeout", b"cf-aig-max-attempts", b"cf-aig-retry-delay", b"cf-aig-backoff"}
)


async def completed(
    request: Request, services: Services, wanted: GenerationRequest
) -> tuple[GenerationRequest, Completion, dict[str, str]]:
    """The request as it was served, its answer, and headers that say so."""
    persistence = _persistence(request)
    if persistence is ONCE and not wanted.fallbacks:
        return wanted, await services.pipeline.complete(wanted), retirement_headers(services.catalogue, wanted.model)
    return _told(services, await _attempts(services, wanted).complete(wanted, persistence, _renaming(request)))


async def streamed(
    request: Request, services: Services, wanted: GenerationRequest
) -> tuple[GenerationRequest, Stream, dict[str, str]]:
    """As `completed`, with a stream that has begun."""
    persistence = _persistence(request)
    if persistence is ONCE and not wanted.fallbacks:
        return wanted, await services.pipeline.stream(wanted), retirement_headers(services.catalogue, wanted.model)
    return _told(services, await _attempts(services, wanted).stream(wanted, persistence, _renaming(request)))


def _attempts(services: Services, wanted: GenerationRequest) -> Attempts:
    """Raises ModelNotFound, ModelRetired or TaskMismatch now for a fallback that could only fail when it is needed."""
    for model in wanted.fallbacks:
        services.catalogue.get_for(TEXT_GENERATION, model, wanted.received_at_ns)
    return Attempts(services.pipeline, new_id=lambda: str(uuid_utils.uuid7()))


def _renaming(request: Request) -> Callable[[str], None]:
    """The answer's id is the attempt's that it answers, in its headers too: that is where its record is found."""
    return partial(operator.setitem, request.scope["state"], "request_id")


def _told(services: Services, served: Served[Answer]) -> tuple[GenerationRequest, Answer, dict[str, str]]:
    headers = {"cf-aig-step": str(served.step), "cf-aig-model": served.request.model}
    headers |= retirement_headers(services.catalogue, served.request.model)
    if len(served.ids) > 1:
        headers["x-pagegate-attempts"] = ", ".join(served.ids)
    return served.request, served.answer, headers


def _persistence(request: Request) -> Persistence:
    """Raises InputInvalid: a bound that can't be honoured must not be ignored."""
    sent = sent_headers(request.scope)
    if _ASKING.isdisjoint(sent):
        return ONCE
    found = {str(name, "latin-1"): str(sent[name][-1], "latin-1") for name in _ASKING & sent.keys()}
    timeout_ms = _number(found, "cf-aig-request-timeout", least=1, most=TIMEOUT_MS_MAX)
    attempts = _number(found, "cf-aig-max-attempts", least=1, most=ATTEMPTS_MAX)
    delay_ms = _number(found, "cf-aig-retry-delay", least=0, most=round(DELAY_S_MAX * 1000))
    backoff = found.get("cf-aig-backoff", Backoff.CONSTANT)
    if backoff not in set(Backoff):
        raise InputInvalid(("cf-aig-backoff",), f"must be one of {', '.join(Backoff)}.")
    if timeout_ms is None and attempts is None:
        return ONCE
    return Persistence(
        attempts=attempts or 1,
        first_byte_s=None if timeout_ms is None else timeout_ms / 1000,
        delay_s=(delay_ms or 0) / 1000,
        backoff=Backoff(backoff),
    )


def _number(found: dict[str, str], name: str, *, least: int, most: int) -> int | None:
    text = found.get(name)
    if text is None:
        return None
    if _NUMBER.fullmatch(text) is None or not least <= int(text) <= most:
        raise InputInvalid((name,), f"must be a whole number from {least} to {most}.")
    return int(text)
