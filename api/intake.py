"""From an arrived request to the gateway's GenerationRequest: the part that does not depend on the dialect.

Called by the generating routes once they have authenticated and parsed; each dialect's translate.py gives the prompt.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import orjson
from starlette.requests import Request

from api.answer_form import form_fields
from api.errors import InputInvalid
from api.sampling import GenerationOptions
from api.sent_headers import sent_headers
from api.services import Services
from billing.attribution import scalar_tags
from gateway.decision import Decision
from gateway.request import Endpoint, GenerationRequest
from tenancy.principal import Principal
from tenancy.values import value

# A longer word for a session is cut: it is remembered for routing, and must not fill memory.
_SESSION_CHARS_MAX = 256
_HEADER_TAGS_MAX = 5
_METADATA_CHARS_MAX = 4_096


@value
class Arrival:
    """What is known of a request apart from its body."""

    id: str
    principal: Principal
    received_at_ns: int
    deadline_s: float
    choices_max: int
    session: str
    decision: Decision
    tags: Mapping[str, str] = field(default_factory=dict)


def arrival(
    request: Request, services: Services, principal: Principal, tags: Mapping[str, str] | None = None
) -> Arrival:
    """tags: of the request's head beside those of `cf-aig-metadata`, which go before. Raises InputInvalid."""
    state = request.scope["state"]
    # Where the outermost layer finds it: for the log line, and for the answer of whoever asked.
    decision = state["decision"] = Decision()
    return Arrival(
        id=state["request_id"],
        principal=principal,
        received_at_ns=state["received_at_ns"],
        deadline_s=services.settings.gateway.queue_wait_seconds_max,
        choices_max=services.settings.choices_max,
        session=(_header(request, b"x-session-affinity") or b"")[:_SESSION_CHARS_MAX].decode("latin-1"),
        decision=decision,
        tags={**(tags or {}), **header_tags(request)},
    )


def header_tags(request: Request) -> dict[str, str]:
    """Of `cf-aig-metadata`: a JSON object of at most five scalars. Raises InputInvalid."""
    found = _header(request, b"cf-aig-metadata")
    if found is None:
        return {}
    try:
        if len(found) > _METADATA_CHARS_MAX:
            raise ValueError(f"must be at most {_METADATA_CHARS_MAX} characters.")  # noqa: TRY301 - one place words it
        return scalar_tags(orjson.loads(found), tags_max=_HEADER_TAGS_MAX)
    except ValueError as error:  # orjson's, too
        said = "must be a JSON object." if isinstance(error, orjson.JSONDecodeError) else str(error)
        raise InputInvalid(("cf-aig-metadata",), said) from None


def _header(request: Request, wanted: bytes) -> bytes | None:
    found = sent_headers(request.scope).get(wanted)
    return None if found is None else found[0]


async def formed(options: GenerationOptions, make: Callable[[], GenerationRequest]) -> GenerationRequest:
    """What `make` makes of the options; beside the event loop if they ask for a form: compiling a large one takes
    seconds, and other requests go on meanwhile.
    """
    return await asyncio.to_thread(make) if options.has_form else make()


def generation_request(
    arrived: Arrival,
    options: GenerationOptions,
    *,
    model: str,
    endpoint: Endpoint,
    route: str,
    prompt: str | tuple[int, ...] | None = None,
    messages: tuple[dict[str, Any], ...] | None = None,
    more_sampling: dict[str, Any] | None = None,
) -> GenerationRequest:
    """Raises InputInvalid for parameters that contradict each other or this server's bounds, or are not served."""
    options.refuse_other_forms()
    form = form_fields(options, chat=endpoint is Endpoint.CHAT) if options.has_form else {}
    return GenerationRequest(
        id=arrived.id,
        principal=arrived.principal,
        model=model,
        endpoint=endpoint,
        route=route,
        messages=messages,
        prompt=prompt,
        sampling={**options.engine_fields(), **(more_sampling or {}), **form},
        max_tokens=options.output_tokens,
        n=options.choices(arrived.choices_max),
        stream=options.streamed,
        reject_if_busy=options.reject_if_busy,
        received_at_ns=arrived.received_at_ns,
        deadline_s=arrived.deadline_s,
        session=arrived.session,
        fallbacks=options.models or (),
        service_tier=options.tier,
        attribution=options.attribution(arrived.tags),
        decision=arrived.decision,
    )
