"""GET …/usage: any range, in any steps, by any dimension; the state is in the address, and the table is also CSV.

The figures are those of GET /console/v1/accounts/{account_id}/usage with the same filter; the page names that call.
"""

import csv
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from starlette.responses import Response

from api.console.accounts import iso
from api.console.schemas import Instant, Name, parse_query
from api.dashboard.access import Visit
from api.dashboard.charts import band_name, chart_of
from api.dashboard.figures import step_text
from api.dashboard.key_names import key_names, project_names
from api.dashboard.pages import HEADERS, Pages
from api.dashboard.usage_filter import MAYBE, FilterQuery
from api.errors import InputInvalid
from billing.budgets import BudgetPeriod
from billing.dashboard.explorer import Exploration, Measure, explore, reach_fault
from billing.errors import UsageQueryUnsupported
from billing.money import neurons_decimal, usd_decimal
from billing.rollups import DAY_NS
from billing.store import UsageStore
from billing.summaries import EVERYTHING, PERIODS_NS, GroupBy, UsageFilter, UsageTotals

_SECOND_NS: Final = 1_000_000_000
_DIMENSIONS: Final = (
    GroupBy.MODEL,
    GroupBy.KEY,
    GroupBy.PROJECT,
    GroupBy.END_USER,
    GroupBy.TAG,
    GroupBy.ENDPOINT,
    GroupBy.OUTCOME,
)
_FILTERS: Final = ("model", "key", "project", "endpoint", "outcome", "end_user", "tag")
_OPTIONS_MAX: Final = 200
_CSV_GROUPS_MAX: Final = 1_000


class ExplorerQuery(FilterQuery):
    """Everything that the page shows follows from this."""

    from_ns: Annotated[Instant | None, MAYBE] = None
    to_ns: Annotated[Instant | None, MAYBE] = None
    step: GroupBy = GroupBy.DAY
    by: Literal[
        GroupBy.MODEL,
        GroupBy.KEY,
        GroupBy.PROJECT,
        GroupBy.END_USER,
        GroupBy.TAG,
        GroupBy.ENDPOINT,
        GroupBy.OUTCOME,
        GroupBy.NONE,
    ] = GroupBy.MODEL
    measure: Measure = Measure.COST
    running: bool = False
    endpoint: Annotated[Name | None, MAYBE] = None

    @property
    def only(self) -> UsageFilter:
        return replace(super().only, endpoint=self.endpoint)


@dataclass(frozen=True, slots=True)
class Preset:
    title: str
    from_text: str
    to_text: str
    step: GroupBy


class ExplorerPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        query, from_ns, to_ns = _asked(visit)
        services, usage = visit.services, visit.services.usage
        await services.settled()
        now_ns = time.time_ns()
        fault = _fault(query, from_ns, to_ns)
        found: Exploration | None = None
        if fault is None:
            try:
                found = await services.database.call(_explored, usage, visit.account_id, from_ns, to_ns, query)
            except UsageQueryUnsupported as unsupported:
                fault = str(unsupported)
        names = await key_names(visit)
        projects = await project_names(visit)
        options = await services.database.call(_options, usage, visit.account_id, from_ns, to_ns)
        options |= {"key": list(names)[:_OPTIONS_MAX], "project": list(projects)[:_OPTIONS_MAX]}
        names |= projects
        return self._pages.page(
            visit,
            "explorer.html.j2",
            here="usage",
            title="Usage",
            as_of_ns=now_ns,
            status=200 if fault is None else 400,
            q=query,
            parameters=_parameters(query, from_ns, to_ns),
            from_text=step_text(from_ns, 0),
            to_text=step_text(to_ns, 0),
            fault=fault,
            found=found,
            filtered=query.only != EVERYTHING,
            chart=None
            if found is None
            else chart_of(found, query.measure, PERIODS_NS[query.step], names, running=query.running),
            rows=[] if found is None else _rows(found, names),
            steps=(GroupBy.MINUTE, GroupBy.HOUR, GroupBy.DAY),
            dimensions=(*_DIMENSIONS, GroupBy.NONE),
            measures=tuple(Measure),
            options=options,
            names=names,
            presets=_presets(now_ns),
            api_query=_api_query(query, from_ns, to_ns),
        )

    async def csv(self, visit: Visit) -> Response:
        """One row a step and group, all groups; its sums are those of the page."""
        query, from_ns, to_ns = _asked(visit)
        fault = _fault(query, from_ns, to_ns)
        if fault is not None:
            raise InputInvalid(("step",), fault)
        await visit.services.settled()
        names = await key_names(visit) | await project_names(visit)
        try:
            text = await visit.services.database.call(
                _csv, visit.services.usage, visit.account_id, from_ns, to_ns, query, names
            )
        except UsageQueryUnsupported as unsupported:
            raise InputInvalid(("by",), str(unsupported)) from unsupported
        name = f"pagegate-usage-{step_text(from_ns, DAY_NS)}-{step_text(to_ns, DAY_NS)}.csv"
        attached = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(text, media_type="text/csv", headers=HEADERS | attached)


def _asked(visit: Visit) -> tuple[ExplorerQuery, int, int]:
    given = dict(visit.request.query_params)
    renamed = {"from": "from_ns", "to": "to_ns"}
    query = parse_query(ExplorerQuery, {renamed.get(name, name): value for name, value in given.items()})
    if query.step not in PERIODS_NS or query.by in PERIODS_NS:
        raise InputInvalid(("step",), "steps are times, and groups are not.")
    to_ns = query.to_ns if query.to_ns is not None else BudgetPeriod.DAY.around(time.time_ns())[1]
    from_ns = query.from_ns if query.from_ns is not None else max(0, to_ns - 30 * DAY_NS)
    return query, from_ns, to_ns


def _fault(query: ExplorerQuery, from_ns: int, to_ns: int) -> str | None:
    if from_ns >= to_ns:
        return "The range ends before it begins."
    return reach_fault(from_ns, to_ns, query.step, query.by, query.only)


def _explored(usage: UsageStore, account_id: str, from_ns: int, to_ns: int, query: ExplorerQuery) -> Exploration:
    return explore(usage, account_id, from_ns, to_ns, query.step, query.by, query.measure, query.only)


def _options(usage: UsageStore, account_id: str, from_ns: int, to_ns: int) -> dict[str, list[str]]:
    """What can be filtered by: whatever was used in the range. Keys are listed without asking for their use."""
    found = {}
    for dimension in (GroupBy.MODEL, GroupBy.ENDPOINT, GroupBy.OUTCOME):
        groups = usage.usage_summary(account_id, from_ns, to_ns, dimension).groups if from_ns < to_ns else ()
        found[dimension.value] = [group.key for group in groups[:_OPTIONS_MAX]]
    return found


def _rows(found: Exploration, names: Mapping[str, str]) -> list[tuple[str, str | None, UsageTotals]]:
    """The table: as the chart's bands, so that both add up to the same."""
    return [(band_name(band, found, names), band.key, band.totals) for band in found.bands]


def _parameters(query: ExplorerQuery, from_ns: int, to_ns: int) -> dict[str, str]:
    """The page's own address, with what was left out filled in."""
    told = {"from": iso(from_ns)[:19], "to": iso(to_ns)[:19], "step": query.step.value, "by": query.by.value}
    told |= {"measure": query.measure.value, "running": "1" if query.running else ""}
    return told | {name: getattr(query, name) or "" for name in _FILTERS}


def _api_query(query: ExplorerQuery, from_ns: int, to_ns: int) -> dict[str, str]:
    told = {"from": iso(from_ns), "to": iso(to_ns), "group_by": query.by.value}
    return told | {name: getattr(query, name) or "" for name in _FILTERS}


def _presets(now_ns: int) -> list[Preset]:
    today_ns, tomorrow_ns = BudgetPeriod.DAY.around(now_ns)
    month_ns = BudgetPeriod.MONTH.around(now_ns)
    last_month_ns = BudgetPeriod.MONTH.around(month_ns[0] - 1)
    hour_ns = PERIODS_NS[GroupBy.HOUR]
    ranges = (
        ("Last hour", now_ns // (60 * _SECOND_NS) * 60 * _SECOND_NS - hour_ns + 60 * _SECOND_NS, None, GroupBy.MINUTE),
        ("Today", today_ns, tomorrow_ns, GroupBy.HOUR),
        ("7 days", tomorrow_ns - 7 * DAY_NS, tomorrow_ns, GroupBy.DAY),
        ("30 days", tomorrow_ns - 30 * DAY_NS, tomorrow_ns, GroupBy.DAY),
        ("90 days", tomorrow_ns - 90 * DAY_NS, tomorrow_ns, GroupBy.DAY),
        ("This month", *month_ns, GroupBy.DAY),
        ("Last month", *last_month_ns, GroupBy.DAY),
    )
    found = []
    for title, from_ns, to_ns, step in ranges:
        end_ns = from_ns + hour_ns if to_ns is None else to_ns
        found.append(Preset(title, _form_time(from_ns), _form_time(end_ns), step))
    return found


def _form_time(at_ns: int) -> str:
    moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=at_ns // _SECOND_NS)
    return moment.strftime("%Y-%m-%dT%H:%M:%S")


def _csv(  # noqa: PLR0917 - where, whose, when, what, called what
    usage: UsageStore, account_id: str, from_ns: int, to_ns: int, query: ExplorerQuery, names: Mapping[str, str]
) -> str:
    summary = usage.usage_summary(account_id, from_ns, to_ns, query.by, query.only)
    keys = [group.key for group in summary.groups]
    if len(keys) > _CSV_GROUPS_MAX or summary.truncated:
        raise InputInvalid(("by",), f"a table tells of at most {_CSV_GROUPS_MAX} groups: filter, or group otherwise.")
    points = usage.usage_series(account_id, from_ns, to_ns, query.step, query.by, keys, query.only)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(
        [f"{query.step.value}_begins_utc", query.by.value, "name", "requests", "prompt_tokens", "cached_tokens",
         "completion_tokens", "reasoning_tokens", "cost_usd", "neurons"]
    )  # fmt: skip
    for point in points:
        key = point.key or ""
        writer.writerow([iso(point.starts_at_ns), _cell(key), _cell(names.get(key, key)), *_cells(point.totals)])
    writer.writerow(["total", "", "", *_cells(summary.totals)])
    return text.getvalue()


def _cells(totals: UsageTotals) -> list[Any]:
    return [
        totals.requests,
        totals.prompt_tokens,
        totals.cached_tokens,
        totals.completion_tokens,
        totals.reasoning_tokens,
        usd_decimal(totals.cost_nano),
        neurons_decimal(totals.neurons_micro),
    ]


def _cell(text: str) -> str:
    """A spreadsheet would run a name that begins like a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
