"""The page of batches: how far each is, what it cost, and who may end it."""

import time

from billing.usage import TokenUsage
from gateway.batches.batch import Batch, BatchState, FormName, LineState
from gateway.batches.store import BatchStore
from tests.api.dashboard.visitors import Dashboard, text_of
from tests.billing.rows import event_row, post_rows
from tests.gateway.batches.made import order


def store_of(site: Dashboard) -> BatchStore:
    store: BatchStore = site.services.batching.store
    return store


def run_one(site: Dashboard, batch: Batch, state: LineState, *, cost_nano: int) -> None:
    line = store_of(site).claim(batch.id, "me")
    assert line is not None
    post_rows(site.database, event_row(id=line.request_id, account_id=batch.account_id, cost_nano=cost_nano))
    assert store_of(site).end(line, state, b"said", TokenUsage(1_234, 0, 567))


async def test_progress_and_cost_of_each_batch_are_shown(site: Dashboard) -> None:
    batch = store_of(site).create(site.account_id, order(4))
    other = store_of(site).create(site.account_id, order(2, form=FormName.WORKERS_AI))
    foreign = store_of(site).create(site.other_id, order(2))
    run_one(site, batch, LineState.SUCCEEDED, cost_nano=1_500_000_000)
    run_one(site, batch, LineState.SUCCEEDED, cost_nano=500_000_000)
    run_one(site, batch, LineState.FAILED, cost_nano=0)
    visitor = await site.visitor("viewer")
    answer = await visitor.get(site.path("/batches"))
    page = text_of(answer)
    newest, oldest = page.split(batch.id)
    assert other.id in newest
    assert "queued requests" in newest
    for figure in ("in progress", "3 of 4", "3,702", "1,701", "$2.00"):
        assert figure in oldest, (figure, oldest)
    assert 'aria-label="3 of 4 requests have ended"' in answer.body.decode()
    assert foreign.id not in page
    assert "Cancel" not in page


async def test_a_developer_and_an_operator_end_batches_of_the_account_alone(site: Dashboard) -> None:
    for who in ("developer", "operator"):
        batch = store_of(site).create(site.account_id, order(2))
        visitor = await site.visitor(who)
        assert "Run no more of it" in text_of(await visitor.get(site.path("/batches")))
        ended = await visitor.post(site.path(f"/batches/{batch.id}/cancel"))
        assert (ended.status, ended.headers["location"]) == (303, site.path("/batches"))
        assert store_of(site).get(site.account_id, batch.id).state is BatchState.CANCELLING
    foreign = store_of(site).create(site.other_id, order(2))
    assert (await visitor.post(site.path(f"/batches/{foreign.id}/cancel"))).status == 404
    assert store_of(site).get(site.other_id, foreign.id).state is BatchState.IN_PROGRESS


async def test_what_has_ended_can_not_be_cancelled_and_the_page_says_so(site: Dashboard) -> None:
    batch = store_of(site).create(site.account_id, order(0))
    while store_of(site).advance(batch.id, lambda *_: b""):
        pass
    visitor = await site.visitor("owner")
    assert "Cancel" not in text_of(await visitor.get(site.path("/batches")))
    answer = await visitor.post(site.path(f"/batches/{batch.id}/cancel"))
    assert answer.status == 409
    assert "can't be cancelled" in text_of(answer)


async def test_pages_of_batches_join_without_gaps(site: Dashboard) -> None:
    made = {store_of(site).create(site.account_id, order(1)).id for _ in range(23)}
    visitor = await site.visitor("viewer")
    seen: list[str] = []
    path = site.path("/batches")
    deadline = time.monotonic() + 10
    while path and time.monotonic() < deadline:
        body = (await visitor.get(path)).body.decode()
        seen += [part.split('"', 1)[0] for part in body.split('data-batch="')[1:]]
        onward = body.split('rel="next" href="')[1:]
        path = onward[0].split('"', 1)[0] if onward else ""
    assert len(seen) == 23
    assert set(seen) == made
