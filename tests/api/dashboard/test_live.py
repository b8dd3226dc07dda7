"""The operator's live figures: one sample for all viewers, rates between samples, bounded viewers, ended sessions."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from api.dashboard.live import VIEWERS_MAX, LiveFigures, release_chart
from api.siblings import ALONE
from backends.engine_figures import EngineFigures
from gateway.metrics import GatewayMetrics
from gateway.request import Outcome
from tests.api.console.test_operations import fleet
from tests.api.dashboard.visitors import Dashboard, text_of
from tests.api.exchange import exchange
from tests.fakes import MODEL, until


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _figures(clock: _Clock) -> tuple[LiveFigures, GatewayMetrics]:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    services = SimpleNamespace(
        registry=registry,
        fleet=SimpleNamespace(all=lambda: ()),
        holds=SimpleNamespace(live={}),
        siblings=ALONE,
    )
    return LiveFigures(cast("Any", services), monotonic=clock, clock=lambda: round(clock.now * 1e9)), metrics


async def test_viewers_of_the_same_second_share_a_sample() -> None:
    clock = _Clock()
    figures, _ = _figures(clock)
    assert (await figures.look()).sample is (await figures.look()).sample
    clock.now += 1
    assert len((await figures.look()).chart["steps"]) == 2


async def test_rates_are_between_two_samples() -> None:
    clock = _Clock()
    figures, metrics = _figures(clock)
    assert (await figures.look()).refused_per_s is None
    for outcome in (Outcome.REFUSED, Outcome.REFUSED, Outcome.EVICTED):
        metrics.refused(MODEL, outcome)
    metrics.refused(MODEL, Outcome.INTEGRITY_ABORT)
    clock.now += 2
    view = await figures.look()
    assert (view.ended_per_s, view.refused_per_s, view.sample.refused, view.sample.mismatched) == (0.5, 1.5, 3, 1)


async def test_the_past_is_bounded() -> None:
    clock = _Clock()
    figures, _ = _figures(clock)
    for _ in range(500):
        clock.now += 1
        view = await figures.look()
    assert len(view.chart["steps"]) == 180


async def test_events_carry_the_figures_and_end_with_the_viewer(site: Dashboard) -> None:
    visitor = await site.visitor("operator")
    stream = exchange(site.app, "GET", "/dashboard/operator/events", key=None, headers=visitor._headers({})).start()
    await stream.until_sent(1)
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert b"KV pages used" in stream.body
    stream.leave()
    await stream.ended()


async def test_the_page_says_what_engines_say_of_their_cache_and_tags(site: Dashboard) -> None:
    said, silent = fleet(), fleet()
    said.replicas[0].figures = EngineFigures(
        evictable_tokens=160, retracted_waiting=2, retractions=31, tags_active=1, pages_checked=1234, tag_aborts=0
    )
    site.fakes.fleets = [said, silent]
    page = text_of(await (await site.visitor("operator")).get("/dashboard/operator"))
    for told, untold in (
        ("evictable cache 10 of the free ones", "evictable cache – of the free ones"),
        ("retracted 2 now, 31 since its start", "retracted – now"),
        ("page tags 1,234 pages checked, 0 mismatches, – in quarantine", "page tags –"),
    ):
        assert (page.count(told), page.count(untold)) == (1, 1)


async def test_more_viewers_than_the_bound_are_told_so(site: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.dashboard.operator.VIEWERS_MAX", 1)
    visitor = await site.visitor("operator")
    stream = exchange(site.app, "GET", "/dashboard/operator/events", key=None, headers=visitor._headers({})).start()
    await stream.until_sent(1)
    refused = await visitor.get("/dashboard/operator/events")
    assert (refused.status, "Too many live pages" in text_of(refused)) == (503, True)
    stream.leave()
    await stream.ended()
    assert VIEWERS_MAX > 1


async def test_a_session_that_ends_ends_its_events(site: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.dashboard.operator._SESSION_CHECKED_S", 0.0)
    monkeypatch.setattr("api.dashboard.operator.SAMPLE_S", 0.01)
    visitor = await site.visitor("operator")
    stream = exchange(site.app, "GET", "/dashboard/operator/events", key=None, headers=visitor._headers({})).start()
    await stream.until_sent(1)
    await visitor.post("/dashboard/sign-out")
    await until(lambda: stream.complete)
    await stream.ended()


def test_the_release_curves_of_replicas_share_one_axis() -> None:
    forecasts = {"a": [[0.0, 100], [2.0, 40]], "b": [[1.0, 7]], "c": []}
    replicas = [{"id": name, "forecast": {"release": curve}} for name, curve in forecasts.items()]
    chart = release_chart({"models": [{"replicas": [*replicas, {"id": "d", "forecast": None}]}]})
    assert chart["steps"] == [0.0, 1.0, 2.0]
    assert chart["bands"] == [{"name": "a", "values": [100, 100, 40]}, {"name": "b", "values": [7, 7, 7]}]
