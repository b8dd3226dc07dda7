"""Predicted waits follow what waits turn out to be; Retry-After follows what retries turn out to be."""

import random

import pytest

from gateway.waiting_forecast import WaitForecast


def test_nothing_ahead_is_no_wait() -> None:
    assert WaitForecast().starts_in(0.0).p90_s == 0.0


def test_the_median_and_the_90_percent_quantile_are_learned() -> None:
    forecast, draw = WaitForecast(), random.Random(1)
    for _ in range(4000):
        forecast.observe(10.0, 10.0 * draw.uniform(1.0, 3.0))
    starts = forecast.starts_in(10.0)
    assert starts.p50_s == pytest.approx(20.0, rel=0.15)
    assert starts.p90_s == pytest.approx(28.0, rel=0.15)


def test_short_waits_teach_nothing() -> None:
    forecast = WaitForecast()
    for _ in range(100):
        forecast.observe(0.01, 60.0)
    assert forecast.starts_in(1.0).p50_s == 1.0


def test_retry_after_is_at_least_a_second_and_capped() -> None:
    forecast = WaitForecast()
    for _ in range(1000):
        forecast.observe_retry(admitted=True)
    assert forecast.retry_after_s(0.0, jitter=0.0, most_s=60) == 1.0
    assert forecast.retry_after_s(1e9, jitter=0.9, most_s=60) == 60.0


def test_jitter_spreads_over_a_quarter() -> None:
    forecast = WaitForecast()
    plain = forecast.retry_after_s(10.0, jitter=0.0, most_s=600)
    assert plain < forecast.retry_after_s(10.0, jitter=0.99, most_s=600) <= 1.25 * plain


def test_hints_that_disappoint_grow_and_hints_that_hold_shrink_again() -> None:
    forecast = WaitForecast()
    for _ in range(1000):
        forecast.observe_retry(admitted=True)
    before = forecast.retry_after_s(2.0, jitter=0.0, most_s=600)
    for _ in range(30):
        forecast.observe_retry(admitted=False)
    stretched = forecast.retry_after_s(2.0, jitter=0.0, most_s=600)
    assert stretched > 3 * before
    for _ in range(1000):
        forecast.observe_retry(admitted=True)
    assert forecast.retry_after_s(2.0, jitter=0.0, most_s=600) == before
