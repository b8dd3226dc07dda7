"""What an account used, by model and day, and the neurons that are left of today."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from api.console.accounts import iso
from billing.rollups import DAY_NS
from billing.summaries import EVERYTHING, GroupBy, UsageFilter, UsageGroup, UsageSummary, UsageTotals
from tenancy.claims import DAY_MS, Claim, Meter, Standing
from tenancy.principal import Principal
from tenancy.quotas import FREE_PLAN, MICRO, Quota
from tests.api.exchange import get
from tests.fakes import ACCOUNT, KEY, MODEL, OTHER_ACCOUNT, FakeHolds, Fakes, FakeUsage, principal

USAGE = f"/client/v4/accounts/{ACCOUNT}/ai/usage"
TOTALS = UsageTotals(2, 22, 8, 18, 0, 86_580, 7_870_800)
WRITTEN = {
    "requests": 2,
    "prompt_tokens": 22,
    "cached_tokens": 8,
    "completion_tokens": 18,
    "reasoning_tokens": 0,
    "neurons": 7.8708,
    "cost": "0.00008658",
}
DAY = "20400"  # since 1970
DATE = "2025-11-08"


class TwoModels(FakeUsage):
    """Each with one day."""

    def usage_summary(
        self, account_id: str, from_ns: int, to_ns: int, group_by: GroupBy, only: UsageFilter
    ) -> UsageSummary:
        self.asked.append((account_id, from_ns, to_ns, group_by, only))
        keys = {GroupBy.MODEL: ("a", "b"), GroupBy.DAY: (DAY,), GroupBy.NONE: ()}[group_by]
        return UsageSummary(TOTALS, tuple(UsageGroup(key, TOTALS) for key in keys))


class TestGroups:
    @pytest.mark.parametrize(
        ("group_by", "groups"),
        [
            ("", []),
            ("model", [{"model": "a"}, {"model": "b"}]),
            ("day", [{"day": DATE}]),
            ("model,day", [{"model": "a", "day": DATE}, {"model": "b", "day": DATE}]),
            ("day,model", [{"model": "a", "day": DATE}, {"model": "b", "day": DATE}]),
        ],
    )
    async def test_are_models_days_or_both(self, fakes: Fakes, group_by: str, groups: list[dict[str, str]]) -> None:
        fakes.usage = TwoModels()
        query = f"?group_by={group_by}" if group_by else ""
        result = (await get(create_app(fakes.services), USAGE + query)).json["result"]
        assert result["groups"] == [{**key, **WRITTEN} for key in groups]
        assert result["totals"] == WRITTEN
        assert result["group_by"] == (group_by.split(",") if group_by else [])
        assert result["truncated"] is False

    async def test_of_very_many_models_are_cut_and_it_is_said(self, fakes: Fakes) -> None:
        fakes.usage.summary = UsageSummary(TOTALS, tuple(UsageGroup(str(number), TOTALS) for number in range(101)))
        result = (await get(create_app(fakes.services), f"{USAGE}?group_by=model,day")).json["result"]
        assert result["truncated"] is True
        assert len({group["model"] for group in result["groups"]}) == 100

    @pytest.mark.parametrize("query", ["group_by=key", "group_by=model,model", "group_by=", "from=x", "from=2&to=1"])
    async def test_other_words_are_refused_by_name(self, app: ASGIApp, query: str) -> None:
        answer = await get(app, f"{USAGE}?{query}")
        assert (answer.status, answer.json["errors"][0]["code"]) == (400, 5006)
        assert f"'/{query.partition('=')[0]}'" in answer.json["errors"][0]["message"]


async def test_the_period_is_the_one_asked_for_and_half_open(app: ASGIApp, fakes: Fakes) -> None:
    result = (await get(app, f"{USAGE}?from=2026-11-01&to=1800000000")).json["result"]
    assert (result["from"], result["to"]) == ("2026-11-01T00:00:00.000000Z", "2027-01-15T08:00:00.000000Z")
    period = (ACCOUNT, 1_793_491_200 * 10**9, 1_800_000_000 * 10**9, GroupBy.NONE, EVERYTHING)
    assert fakes.usage.asked[0] == period
    assert fakes.metering.flushed == 1


async def test_the_period_is_the_last_30_days_if_none_is_given(app: ASGIApp, fakes: Fakes) -> None:
    await get(app, USAGE)
    _, from_ns, to_ns, _, _ = fakes.usage.asked[0]
    assert to_ns - from_ns == 30 * DAY_NS
    assert abs(time.time_ns() - to_ns) < 60 * 10**9


class Meters:
    """Two daily rules and one about a minute, as they stand."""

    def __init__(self, *left: int) -> None:
        self._left = left
        self.asked: list[tuple[Principal, str]] = []

    async def standings(self, who: Principal, model: str) -> tuple[Standing, ...]:
        self.asked.append((who, model))
        minute = Standing(Claim(Meter.REQUESTS_PER_MINUTE, "minute", 1, 5, 5_000, 13), 5, 0)
        daily = [
            Standing(Claim(Meter.NEURONS_PER_DAY, str(index), 0, 10_000 * MICRO, DAY_MS, 1), 10_000 * MICRO - left, 0)
            for index, left in enumerate(self._left)
        ]
        return (minute, *daily)


def holding(meters: Meters) -> FakeHolds:
    return cast("FakeHolds", SimpleNamespace(meters=meters))


class TestToday:
    async def today(self, fakes: Fakes, *quotas: Quota) -> dict[str, Any]:
        who = fakes.authenticator.keys[KEY]
        assert isinstance(who, Principal)
        fakes.authenticator.keys[KEY] = replace(who, quotas=quotas)
        fakes.usage.summary = UsageSummary(TOTALS, ())
        today = (await get(create_app(fakes.services), USAGE)).json["result"]["today"]
        assert isinstance(today, dict)
        return today

    async def test_is_what_was_used_and_what_is_left_of_the_free_neurons(self, fakes: Fakes) -> None:
        meters = Meters(9_992_129_200)
        fakes.holds = holding(meters)
        before_ns = time.time_ns()
        today = await self.today(fakes, FREE_PLAN)
        assert iso(before_ns)[:10] <= today["date"] <= iso(time.time_ns())[:10]
        assert (today["neurons_used"], today["neurons_limit"], today["neurons_left"]) == (7.8708, 10_000, 9_992.1292)
        assert today["resets_at"].endswith("T00:00:00.000000Z")
        assert [model for _, model in meters.asked] == [""]

    async def test_is_the_tightest_of_several_limits(self, fakes: Fakes) -> None:
        fakes.holds = holding(Meters(500 * MICRO, 20 * MICRO))
        assert (await self.today(fakes, FREE_PLAN))["neurons_left"] == 20

    async def test_is_never_less_than_nothing(self, fakes: Fakes) -> None:
        fakes.holds = holding(Meters(-5 * MICRO))
        assert (await self.today(fakes, FREE_PLAN))["neurons_left"] == 0

    async def test_has_no_limit_without_a_rule_about_the_day(self, fakes: Fakes) -> None:
        today = await self.today(fakes, Quota(Meter.REQUESTS_PER_MINUTE, 5))
        assert (today["neurons_used"], today["neurons_limit"], today["neurons_left"]) == (7.8708, None, None)

    async def test_a_rule_about_one_model_is_none_of_the_account(self, fakes: Fakes) -> None:
        fakes.holds = holding(Meters())
        rule = Quota(Meter.NEURONS_PER_DAY, 5, model=MODEL)
        assert (await self.today(fakes, rule))["neurons_left"] is None


async def test_needs_a_key_of_the_account_that_may_read_usage(app: ASGIApp, fakes: Fakes) -> None:
    fakes.authenticator.keys["bare"] = principal()
    assert (await get(app, USAGE, key="bare")).status == 403
    answer = await get(app, f"/client/v4/accounts/{OTHER_ACCOUNT}/ai/usage")
    assert (answer.status, answer.json["errors"][0]["code"]) == (403, 10000)
