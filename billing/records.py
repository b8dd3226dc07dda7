"""The spool's records as bytes: BEGIN when a request is dispatched, PROGRESS while it runs, END when it is over. Pure.

Compact JSON, the kind first, so that a reader can pass by what it does not need without parsing it. An END carries its
row of usage_events whole: what was charged is decided before the record is durable and never again. What a later
version wrote is read as far as this one knows it: after a crash it is the older one that is started again.
"""

from dataclasses import dataclass, fields
from typing import Any, Final

import orjson

from billing.attribution import Attribution
from billing.rating import Charge
from billing.tables import usage_events
from billing.usage import NO_USAGE, RequestFacts, TokenUsage, UsageRecord, UsageSource

_BEGIN = b'{"t":"B",'
_PROGRESS = b'{"t":"P",'
_END = b'{"t":"E",'
_COLUMNS: Final = frozenset(usage_events.c.keys())
_NEWER: Final[dict[str, Any]] = {
    "tier": "standard",
    "end_user": None,
    "tags": None,
    "kv_page_ms": 0,
    "deployment": None,
    "precisions": None,
    "region": None,
}
_FACTS: Final = frozenset(field.name for field in fields(RequestFacts))
_ATTRIBUTION: Final = frozenset(field.name for field in fields(Attribution))
_COUNTS: Final = 4


@dataclass(slots=True)
class OpenRequest:
    """A BEGIN without an END, and the last that is known of it."""

    facts: RequestFacts
    usage: TokenUsage
    seen_at_ns: int


def encode_begin(facts: RequestFacts) -> bytes:
    return orjson.dumps({"t": "B", "facts": facts})


def encode_progress(request_id: str, usage: TokenUsage, at_ns: int) -> bytes:
    counts = (usage.prompt, usage.cached, usage.completion, usage.reasoning)
    return orjson.dumps({"t": "P", "id": request_id, "at_ns": at_ns, "counts": counts})


def encode_end(record: UsageRecord, charge: Charge, price_version: int | None) -> bytes:
    facts, usage = record.facts, record.usage
    row = {
        "id": facts.request_id,
        "account_id": facts.account_id,
        "key_id": facts.key_id,
        "model": facts.model,
        "endpoint": facts.endpoint,
        "stream": facts.stream,
        "outcome": record.outcome,
        "code": record.code,
        "finish_reason": record.finish_reason,
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "completion_tokens": usage.completion,
        "reasoning_tokens": usage.reasoning,
        "usage_source": usage.source,
        "charged": record.charged,
        "cost_nano": charge.cost_nano,
        "neurons_micro": charge.neurons_micro,
        "price_version": price_version,
        "started_at_ns": facts.started_at_ns,
        "ended_at_ns": record.ended_at_ns,
        "queued_ms": record.queued_ms,
        "ttft_ms": record.ttft_ms,
        "replica": record.replica,
        "tier": facts.tier,
        "end_user": facts.attribution.end_user,
        "tags": facts.attribution.tags,
        "kv_page_ms": record.kv_page_ms,
        "deployment": facts.deployment,
        "precisions": facts.precisions,
        "region": record.region,
    }
    return orjson.dumps({"t": "E", "row": row})


def is_end(payload: bytes) -> bool:
    return payload.startswith(_END)


def decode_end(payload: bytes) -> dict[str, Any]:
    """The row of usage_events. One that an earlier version wrote lacks what is newer: it gets what was meant then."""
    row: dict[str, Any] = orjson.loads(payload)["row"]
    return row if row.keys() == _COLUMNS else _known(_NEWER | row, _COLUMNS)


class OpenRequests:
    """Follows a spool's records in order and remembers which requests have begun and not ended."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self.ends = 0

    def see(self, payload: bytes) -> None:
        if payload.startswith(_BEGIN):
            begun = _known(orjson.loads(payload)["facts"], _FACTS)
            attribution = Attribution(**_known(begun.get("attribution", {}), _ATTRIBUTION))
            facts = RequestFacts(**begun | {"attribution": attribution})
            self._open[facts.request_id] = OpenRequest(facts, NO_USAGE, facts.started_at_ns)
        elif payload.startswith(_PROGRESS):
            progress = orjson.loads(payload)
            request = self._open.get(progress["id"])
            if request is not None:
                request.usage = TokenUsage(*progress["counts"][:_COUNTS])
                request.seen_at_ns = progress["at_ns"]
        elif payload.startswith(_END):
            self._open.pop(decode_end(payload)["id"], None)
            self.ends += 1

    def remaining(self) -> list[OpenRequest]:
        return list(self._open.values())


def recovered(request: OpenRequest, *, charged: bool) -> UsageRecord:
    """The END of a request whose gateway died: what it had surely produced, and not a token more."""
    usage = request.usage
    return UsageRecord(
        facts=request.facts,
        outcome="cancelled",
        usage=TokenUsage(usage.prompt, usage.cached, usage.completion, usage.reasoning, UsageSource.RECOVERED),
        charged=charged,
        ended_at_ns=max(request.facts.started_at_ns, request.seen_at_ns),  # the clock may have been set back meanwhile
        queued_ms=0,
        ttft_ms=None,
        replica=None,
        finish_reason=None,
        code="gateway_died",
    )


def _known(words: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: word for name, word in words.items() if name in names}
