"""Usage and headers of an answer come from the settlement, exactly."""

from dataclasses import replace

from api.tally import cap_header, neurons_header, usage_object
from billing.usage import TokenUsage
from gateway.request import OutputCap
from tests.fakes import SETTLEMENT


def test_usage_is_integers_details_and_a_decimal_string() -> None:
    settled = replace(SETTLEMENT, usage=TokenUsage(prompt=7, cached=3, completion=5, reasoning=2), cost_nano=1)
    assert usage_object(settled) == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
        "cost": "0.000000001",
    }


def test_neurons_are_a_decimal() -> None:
    assert neurons_header(replace(SETTLEMENT, neurons_micro=472_180_000)) == {"cf-ai-neurons": "472.18"}


def test_a_cap_is_told_only_where_it_lowered_what_was_asked() -> None:
    assert cap_header(OutputCap(64, clamped=True)) == {"x-pagegate-max-tokens": "64"}
    assert cap_header(OutputCap(64, clamped=False)) == {}
    told = {"x-pagegate-max-tokens": "64", "x-pagegate-limit-reason": "credits"}
    assert cap_header(OutputCap(64, clamped=True, by_money=True)) == told
