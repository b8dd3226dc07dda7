"""What a record says of how its request was served: page time, precisions, deployment, the time to the first token."""

from billing.budgets import BudgetPeriod
from tests.e2e.dialects import CHAT
from tests.e2e.service import Service

PAGE_TOKENS = 16  # of the scripted engine


async def test_a_record_says_how_it_was_served(service: Service) -> None:
    service.engine.steer(itl_ms=5)
    answer = await service.post(CHAT.path(service), CHAT.body(service, stream=True, max_tokens=100))
    assert answer.status == 200
    row = await service.record(answer.headers["x-request-id"])
    card = service.services.catalogue.get(service.model)
    assert row["precisions"] == ",".join(f"{name}={precision}" for name, precision in card.precisions.items())
    assert row["deployment"] == (card.revision or None)
    served_ms = row["duration_ms"] - row["queued_ms"]
    # Pages of the prompt at least, and of prompt and answer at most, for as long as it was served.
    least = served_ms * (row["prompt_tokens"] // PAGE_TOKENS)
    most = (served_ms + 1) * (-(-(row["prompt_tokens"] + row["completion_tokens"]) // PAGE_TOKENS) + 1)
    assert least // 2 <= row["kv_page_ms"] <= most
    assert row["kv_page_ms"] > 0
    base = f"/accounts/{service.account_id}"
    assert (await service.console(f"{base}/usage"))["totals"]["kv_page_ms"] == row["kv_page_ms"]
    latency = await service.console(f"{base}/latency?model={service.model}")
    assert (latency["answers"], len(latency["ttft_ms_buckets"])) == (1, 1)
    assert row["ttft_ms"] <= latency["ttft_ms_p50"] == latency["ttft_ms_buckets"][0]["up_to"]


async def test_a_refused_request_used_no_pages(service: Service) -> None:
    answer = await service.post(CHAT.path(service), CHAT.body(service, max_tokens=1))
    assert answer.status == 200
    service.services.budgets.add(service.account_id, 0, BudgetPeriod.TOTAL)
    await service.services.holds.credit.refresh()
    assert (await service.post(CHAT.path(service), CHAT.body(service))).status == 429
    refused = (await service.records())[0]
    assert (refused["outcome"], refused["kv_page_ms"], refused["completion_tokens"]) == ("refused", 0, 0)
