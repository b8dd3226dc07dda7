"""GET …/a/{account_id}: what this month came to, at a glance."""

import time

from starlette.responses import Response

from api.dashboard.access import Visit
from api.dashboard.charts import chart_of
from api.dashboard.key_names import key_names
from api.dashboard.pages import Pages
from billing.dashboard.explorer import Measure, cache_hit_permille, explore
from billing.dashboard.overview import look_over
from billing.rollups import DAY_NS
from billing.summaries import EVERYTHING, GroupBy
from tenancy.quotas import FREE_NEURONS_PER_DAY

_CHARTED_DAYS = 30


class OverviewPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        services = visit.services
        await services.settled()
        now_ns = time.time_ns()
        overview = await services.database.call(look_over, services.usage, services.budgets, visit.account_id, now_ns)
        from_ns = overview.today_ns[1] - _CHARTED_DAYS * DAY_NS
        days = await services.database.call(
            explore, services.usage, visit.account_id, from_ns, overview.today_ns[1],
            GroupBy.DAY, GroupBy.MODEL, Measure.COST, EVERYTHING,
        )  # fmt: skip
        return self._pages.page(
            visit,
            "overview.html.j2",
            here="overview",
            title="Overview",
            as_of_ns=now_ns,
            overview=overview,
            free_neurons=FREE_NEURONS_PER_DAY,
            cache_permille=cache_hit_permille(overview.month),
            days=days,
            chart=chart_of(days, Measure.COST, DAY_NS, {}, running=False),
            names=await key_names(visit),
        )
