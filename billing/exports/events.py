"""One JSON line per request: as a CloudEvent, or as a Stripe meter event. Pure; the command line writes them.

CloudEvents 1.0 (https://cloudevents.io); token counts under the names of OpenTelemetry's generative-AI conventions.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

import orjson

from billing.instants import instant_text
from billing.money import neurons_decimal, usd_decimal
from billing.store import UsageEvent

_STRIPE_EVENT_NAME: Final = "pagegate_tokens"


class EventFormat(StrEnum):
    CLOUDEVENTS = "cloudevents"
    STRIPE = "stripe"


def event_line(event: UsageEvent, form: EventFormat) -> bytes:
    return orjson.dumps(_FORMATS[form](event), option=orjson.OPT_APPEND_NEWLINE)


def _cloud_event(event: UsageEvent) -> dict[str, Any]:
    return {
        "specversion": "1.0",
        "type": "pagegate.usage",
        "source": f"/accounts/{event.account_id}",
        "id": event.id,  # receivers drop what they have: an id is a fact
        "time": instant_text(event.ended_at_ns),
        "subject": event.key_id,
        "datacontenttype": "application/json",
        "data": {
            "gen_ai.request.model": event.model,
            "gen_ai.operation.name": event.endpoint,
            "gen_ai.usage.input_tokens": event.prompt_tokens,
            "gen_ai.usage.cached_input_tokens": event.cached_tokens,
            "gen_ai.usage.output_tokens": event.completion_tokens,
            "gen_ai.usage.reasoning_tokens": event.reasoning_tokens,
            "gen_ai.response.finish_reasons": [] if event.finish_reason is None else [event.finish_reason],
            "outcome": event.outcome,
            "cost_usd": usd_decimal(event.cost_nano),
            "neurons": neurons_decimal(event.neurons_micro),
            "price_version": event.price_version,
            "started_at": instant_text(event.started_at_ns),
        },
    }


def _stripe_event(event: UsageEvent) -> dict[str, Any]:
    """The account id stands for the customer: an operator's import maps it to Stripe's own."""
    return {
        "event_name": _STRIPE_EVENT_NAME,
        "identifier": event.id,
        "timestamp": event.ended_at_ns // 10**9,
        "payload": {
            "stripe_customer_id": event.account_id,
            "value": str(event.prompt_tokens + event.completion_tokens),
            "cost_nano_usd": str(event.cost_nano),
        },
    }


_FORMATS: Final[dict[EventFormat, Callable[[UsageEvent], dict[str, Any]]]] = {
    EventFormat.CLOUDEVENTS: _cloud_event,
    EventFormat.STRIPE: _stripe_event,
}
