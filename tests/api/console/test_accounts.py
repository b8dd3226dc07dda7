"""An account's usage and requests, for its own keys alone."""

import time

import pytest
from starlette.types import ASGIApp

from billing.errors import BillingUnavailable
from billing.rollups import DAY_NS
from billing.summaries import EVERYTHING, GroupBy, UsageFilter, UsageGroup, UsageSummary, UsageTotals
from tests.api.exchange import get
from tests.fakes import ACCOUNT, ADMIN_KEY, CREATED, KEY, OTHER_ACCOUNT, Fakes, principal, usage_event

BASE = f"/console/v1/accounts/{ACCOUNT}"
TOTALS = UsageTotals(2, 22, 8, 18, 0, 86_580, 7_870_800, 9_000)
WRITTEN = {
    "requests": 2,
    "prompt_tokens": 22,
    "cached_tokens": 8,
    "completion_tokens": 18,
    "reasoning_tokens": 0,
    "kv_page_ms": 9_000,
    "cost": "0.00008658",
    "cost_nano": 86_580,
    "neurons": "7.8708",
}


class TestAccess:
    @pytest.mark.parametrize("tail", ["usage", "costs", "requests", "requests/x"])
    @pytest.mark.parametrize("account", [OTHER_ACCOUNT, "0" * 32, "nonsense"])
    async def test_foreign_and_unknown_accounts_are_the_same_404(self, app: ASGIApp, tail: str, account: str) -> None:
        answer = await get(app, f"/console/v1/accounts/{account}/{tail}")
        assert (answer.status, answer.json["code"]) == (404, "account_not_found")
        assert answer.headers["content-type"] == "application/problem+json"

    async def test_needs_a_key_with_the_scope(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.authenticator.keys["bare"] = principal()
        assert (await get(app, f"{BASE}/usage", key=None)).status == 401
        assert (await get(app, f"{BASE}/usage", key="bare")).status == 403
        for key in (KEY, ADMIN_KEY):
            assert (await get(app, f"{BASE}/usage", key=key)).status == 200


class TestUsage:
    async def test_is_totals_of_the_period_asked_for(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.usage.summary = UsageSummary(TOTALS, ())
        answer = await get(app, f"{BASE}/usage?from=2026-11-01&to=1800000000")
        assert answer.json == {
            "account_id": ACCOUNT,
            "from": "2026-11-01T00:00:00.000000Z",
            "to": "2027-01-15T08:00:00.000000Z",
            "group_by": "none",
            "totals": WRITTEN,
            "groups": [],
            "truncated": False,
        }
        assert fakes.usage.asked == [(ACCOUNT, 1_793_491_200 * 10**9, 1_800_000_000 * 10**9, GroupBy.NONE, EVERYTHING)]
        assert fakes.metering.flushed == 1

    async def test_is_of_the_last_30_days_if_no_period_is_given(self, app: ASGIApp, fakes: Fakes) -> None:
        before = time.time_ns()
        await get(app, f"{BASE}/usage")
        (_, from_ns, to_ns, _, _) = fakes.usage.asked[0]
        assert before <= to_ns <= time.time_ns()
        assert to_ns - from_ns == 30 * DAY_NS

    @pytest.mark.parametrize(
        ("by", "key", "written"),
        [
            ("model", "m", "m"),
            ("key", "k", "k"),
            ("endpoint", "chat", "chat"),
            ("outcome", "finished", "finished"),
            ("day", "20833", "2027-01-15"),
            ("hour", "500000", "2027-01-15T08:00:00.000000Z"),
        ],
    )
    async def test_is_grouped(self, app: ASGIApp, fakes: Fakes, by: str, key: str, written: str) -> None:
        fakes.usage.summary = UsageSummary(TOTALS, (UsageGroup(key, TOTALS),))
        answer = await get(app, f"{BASE}/usage?group_by={by}")
        assert answer.json["groups"] == [{by: written, **WRITTEN}]

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ("from=tomorrow", "from"),
            ("from=1969-01-01", "from"),
            ("to=9999-01-01", "to"),
            ("from=2026-02-01&to=2026-01-01", "from"),
            ("from=2026-01-01&to=2026-01-01", "from"),
            ("group_by=week", "group_by"),
            ("group_by=minute", "group_by"),
            ("model=", "model"),
        ],
    )
    async def test_a_bad_query_is_named(self, app: ASGIApp, query: str, param: str) -> None:
        answer = await get(app, f"{BASE}/usage?{query}")
        assert answer.status == 400
        assert f"'/{param}'" in answer.json["detail"]

    async def test_that_can_not_be_brought_up_to_date_is_503(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.metering.error = BillingUnavailable("The database does not answer.", retry_after_s=2)
        answer = await get(app, f"{BASE}/usage")
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")

    async def test_is_of_what_is_named_alone(self, app: ASGIApp, fakes: Fakes) -> None:
        await get(app, f"{BASE}/usage?model=m&key=k&endpoint=chat&outcome=finished")
        assert fakes.usage.asked[0][4] == UsageFilter("m", "k", "chat", "finished")

    async def test_minutes_are_told_of_a_day_at_most(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.usage.summary = UsageSummary(TOTALS, (UsageGroup("30000001", TOTALS),), truncated=True)
        answer = await get(app, f"{BASE}/usage?group_by=minute&from=1800000000&to=1800086400")
        assert answer.json["groups"] == [{"minute": "2027-01-15T08:01:00.000000Z", **WRITTEN}]
        assert answer.json["truncated"] is True


class TestCosts:
    async def test_are_by_day_and_the_same_figures(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.usage.summary = UsageSummary(TOTALS, (UsageGroup("20833", TOTALS),))
        answer = (await get(app, f"{BASE}/costs?from=2027-01-01&to=2027-02-01")).json
        cost = {name: WRITTEN[name] for name in ("cost", "cost_nano", "neurons")}
        assert answer == {
            "account_id": ACCOUNT,
            "from": "2027-01-01T00:00:00.000000Z",
            "to": "2027-02-01T00:00:00.000000Z",
            "currency": "USD",
            "group_by": "day",
            "totals": cost,
            "groups": [{"day": "2027-01-15", **cost}],
            "truncated": False,
        }

    @pytest.mark.parametrize("query", ["group_by=minute", "group_by=outcome", "from=9"])
    async def test_a_bad_query_is_named(self, app: ASGIApp, query: str) -> None:
        answer = await get(app, f"{BASE}/costs?{query}&to=8")
        assert answer.status == 400
        assert "GroupBy" not in answer.json["detail"]


class TestRequests:
    async def test_a_record_is_whole(self, app: ASGIApp, fakes: Fakes) -> None:
        event = usage_event()
        fakes.usage.events = [event]
        answer = await get(app, f"{BASE}/requests/{event.id}")
        assert answer.json == {
            "id": event.id,
            "model": event.model,
            "endpoint": "chat",
            "stream": True,
            "outcome": "finished",
            "code": None,
            "finish_reason": "stop",
            "prompt_tokens": 11,
            "cached_tokens": 4,
            "completion_tokens": 9,
            "reasoning_tokens": 0,
            "usage_source": "engine",
            "cost": "0.00004329",
            "cost_nano": 43_290,
            "neurons": "3.9354",
            "price_version": 1,
            "key_id": "key-1",
            "started_at": "2027-01-15T08:00:00.123456Z",
            "ended_at": "2027-01-15T08:00:01.623456Z",
            "queued_ms": 3,
            "ttft_ms": 120,
            "tier": "standard",
            "end_user": "ada",
            "tags": {"team": "search"},
            "kv_page_ms": 5_000,
            "deployment": "0123456789ab",
            "precisions": "weights=bfloat16,kv_cache=bfloat16",
            "region": "eu-west",
            "duration_ms": 1500,
        }
        assert fakes.metering.flushed == 1

    async def test_an_unknown_and_a_foreign_record_are_the_same_404(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.usage.events = [usage_event(account_id=OTHER_ACCOUNT, id="theirs")]
        for request_id in ("theirs", "unknown"):
            answer = await get(app, f"{BASE}/requests/{request_id}")
            assert (answer.status, answer.json["code"]) == (404, "request_not_found")

    async def test_pages_lead_to_the_next_until_there_is_none(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.usage.events = [usage_event(id=f"0197f5a0-0000-7000-8000-00000000000{index}") for index in range(3)]
        first = (await get(app, f"{BASE}/requests?limit=2")).json
        assert [record["id"][-1] for record in first["requests"]] == ["0", "1"]
        last = fakes.usage.events[1]
        assert first["next"] == f"{last.started_at_ns}.{last.id}"
        second = (await get(app, f"{BASE}/requests?before={first['next']}")).json
        assert fakes.usage.asked[-1] == (ACCOUNT, 50, (CREATED * 10**9 + 123_456_789, last.id), EVERYTHING, 0)
        assert second["next"] is None

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=1001", "before=x", "before=1.x", f"before={'9' * 19}.{'a' * 36}"]
    )
    async def test_a_bad_query_is_named(self, app: ASGIApp, query: str) -> None:
        answer = await get(app, f"{BASE}/requests?{query}")
        assert answer.status == 400
        assert f"'/{query.partition('=')[0]}'" in answer.json["detail"]
