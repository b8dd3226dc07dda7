"""GET …/requests and …/requests/{request_id}: the log, newest first, and one request down to each line of its cost."""

import time
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response

from api.console.schemas import Cursor, parse_query
from api.dashboard.access import Visit
from api.dashboard.key_names import key_names, project_names
from api.dashboard.pages import Pages
from api.dashboard.usage_filter import FilterQuery
from billing.attribution import read_tags
from billing.dashboard.cost_lines import CostLine, cost_lines
from billing.errors import PriceUnavailable
from billing.rollups import DAY_NS
from billing.store import UsageEvent
from billing.summaries import EVERYTHING

_PAGE: Final = 50
# What a filter that matches little looks through: the index is by time alone.
_FILTERED_REACH_NS: Final = 31 * DAY_NS
_FILTERS: Final = ("model", "key", "project", "outcome", "end_user", "tag")
_OUTCOMES: Final = (
    "finished",
    "refused",
    "evicted",
    "cancelled",
    "client_disconnected",
    "upstream_failed",
    "integrity_abort",
)


class LogQuery(FilterQuery):
    before: Cursor = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request's life. permille: of the whole, for the bar."""

    name: str
    ms: int
    permille: int


class RequestPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def log(self, visit: Visit) -> Response:
        query = parse_query(LogQuery, dict(visit.request.query_params))
        only = query.only
        services = visit.services
        await services.settled()
        now_ns = time.time_ns()
        newest_ns = now_ns if query.before is None else query.before[0]
        since_ns = 0 if only == EVERYTHING else max(0, newest_ns - _FILTERED_REACH_NS)
        events = await services.database.call(
            services.usage.recent_requests, visit.account_id, _PAGE, query.before, only, since_ns
        )
        filters = {name: getattr(query, name) or "" for name in _FILTERS}
        return self._pages.page(
            visit,
            "requests.html.j2",
            here="requests",
            title="Requests",
            as_of_ns=now_ns,
            events=events,
            names=await key_names(visit),
            models=sorted({card.id for card in services.catalogue.all()} | {event.model for event in events}),
            outcomes=_OUTCOMES,
            projects=await project_names(visit),
            filters=filters,
            filtered=only != EVERYTHING,
            reach_days=_FILTERED_REACH_NS // DAY_NS,
            first_page=query.before is None,
            onward={**filters, "before": f"{events[-1].started_at_ns}.{events[-1].id}"} if len(events) == _PAGE else {},
        )

    async def one(self, visit: Visit) -> Response:
        services = visit.services
        await services.settled()
        request_id = visit.request.path_params["request_id"]
        event = await services.database.call(services.usage.request_record, visit.account_id, request_id)
        lines: list[CostLine] = []
        if event.price_version is not None:
            try:
                lines = cost_lines(event, services.price_book.by_version(event.price_version))
            except PriceUnavailable:
                lines = []  # set a moment ago by another process: the next look has it
        return self._pages.page(
            visit,
            "request.html.j2",
            here="requests",
            title="Request",
            event=event,
            lines=lines,
            stages=stages(event),
            precisions=_served_in(event),
            tags={} if event.tags is None else read_tags(event.tags),
            names=await key_names(visit),
        )


def _served_in(event: UsageEvent) -> dict[str, str]:
    """From the record, as "kv_cache=fp8_e4m3,…": what the model is served in today may be something else."""
    return dict(pair.split("=", 1) for pair in (event.precisions or "").split(",") if "=" in pair)


def stages(event: UsageEvent) -> list[Stage]:
    """Queued, then to the first token, then to the last. Without a first token the rest is one stage."""
    total_ms = max(0, (event.ended_at_ns - event.started_at_ns) // 1_000_000)
    queued_ms = min(event.queued_ms, total_ms)
    if event.ttft_ms is None:
        parts = [("Queued", queued_ms), ("Running, no first token seen", total_ms - queued_ms)]
    else:
        first_ms = min(max(event.ttft_ms, queued_ms), total_ms)
        parts = [("Queued", queued_ms), ("Prefill", first_ms - queued_ms), ("Decode", total_ms - first_ms)]
    return [Stage(name, ms, 1_000 * ms // total_ms if total_ms else 0) for name, ms in parts]
