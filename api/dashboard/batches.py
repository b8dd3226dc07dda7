"""GET …/batches: batches and background runs, newest first, how far they are and what they cost; and a form to cancel.

Nothing of what their lines ask or say is shown: that is for the account's keys, through the API.
"""

from typing import Annotated, Final

from pydantic import BaseModel
from starlette.responses import RedirectResponse, Response

from api.console.schemas import Name, parse_query
from api.dashboard.access import Visit
from api.dashboard.pages import Pages
from api.dashboard.usage_filter import MAYBE
from gateway.batches.batch import CANCELLABLE, Batch, BatchState, FormName
from gateway.errors import BatchNotCancellable

_PAGE: Final = 20
# Of a larger batch the cost is not summed for a page: each line's record is looked up.
_SUMMED_LINES_MAX: Final = 5_000
_FORMS: Final = {
    FormName.OPENAI: "file of requests",
    FormName.WORKERS_AI: "queued requests",
    FormName.BACKGROUND: "background run",
}
_BADGES: Final = {
    BatchState.COMPLETED: "good",
    BatchState.FAILED: "bad",
    BatchState.EXPIRED: "bad",
    BatchState.CANCELLING: "warn",
}


class BatchesPageQuery(BaseModel):
    """after: the last one of the page before."""

    after: Annotated[Name | None, MAYBE] = None


class BatchPages:
    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    async def page(self, visit: Visit) -> Response:
        return await self._page(visit)

    async def cancel(self, visit: Visit) -> Response:
        """What waits is not run any more; what runs ends, and is charged."""
        batching = visit.services.batching
        try:
            await visit.services.database.call(
                batching.store.cancel, visit.account_id, visit.request.path_params["batch_id"]
            )
        except BatchNotCancellable as error:
            return await self._page(visit, fault=str(error), status=409)
        batching.wake()
        return RedirectResponse(f"/dashboard/a/{visit.account_id}/batches", 303)

    async def _page(self, visit: Visit, *, fault: str = "", status: int = 200) -> Response:
        services = visit.services
        query = parse_query(BatchesPageQuery, dict(visit.request.query_params))
        await services.settled()
        store, call = services.batching.store, services.database.call
        found, more = await call(lambda: store.page(visit.account_id, tuple(FormName), after=query.after, limit=_PAGE))
        summed = [batch.id for batch in found if batch.lines <= _SUMMED_LINES_MAX]
        costs = await call(store.costs_nano, visit.account_id, summed)
        return self._pages.page(
            visit,
            "batches.html.j2",
            here="batches",
            title="Batches",
            status=status,
            batches=[(batch, _bar(batch), costs.get(batch.id)) for batch in found],
            forms=_FORMS,
            badges=_BADGES,
            cancellable=CANCELLABLE,
            summed_lines_max=_SUMMED_LINES_MAX,
            first_page=query.after is None,
            onward=found[-1].id if more else None,
            fault=fault,
        )


def _bar(batch: Batch) -> list[tuple[str, int]]:
    """Shares of 1,000: lines that succeeded, and those that ended otherwise."""
    lines = max(1, batch.lines)
    return [("used", 1_000 * batch.succeeded // lines), ("over", 1_000 * batch.failed // lines)]
