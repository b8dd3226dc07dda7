"""The lines of a request's cost add up to its charge, to the last digit."""

from hypothesis import given
from hypothesis import strategies as st

from billing.dashboard.cost_lines import cost_lines
from billing.rating import rate
from billing.store import UsageEvent
from billing.usage import TokenUsage
from tests.billing.builders import price
from tests.billing.rows import event_row

_MILLION = 1_000_000


@given(
    counts=st.tuples(st.integers(0, 9_999), st.integers(0, 9_999), st.integers(0, 9_999), st.integers(0, 9_999)),
    prices=st.tuples(*[st.integers(0, 10**10)] * 5),
    charged=st.booleans(),
)
def test_lines_add_up_exactly(
    counts: tuple[int, int, int, int], prices: tuple[int, int, int, int, int], *, charged: bool
) -> None:
    cached, fresh, reasoning, plain = counts
    usage = TokenUsage(cached + fresh, cached, plain + reasoning, reasoning)
    of = price(
        input_nano_per_m=prices[0],
        cached_input_nano_per_m=prices[1],
        output_nano_per_m=prices[2],
        reasoning_nano_per_m=prices[3],
        request_nano=prices[4],
    )
    cost_nano = rate(usage, of).cost_nano if charged else 0
    event = UsageEvent(
        **event_row(
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            reasoning_tokens=usage.reasoning,
            charged=charged,
            cost_nano=cost_nano,
        )
    )
    lines = cost_lines(event, of)
    assert sum(line.amount for line in lines) == cost_nano * _MILLION
    assert sum(line.tokens or 0 for line in lines) == usage.prompt + usage.completion
    if charged:
        assert all(abs(line.amount) < _MILLION for line in lines if line.name == "Rounding")
    else:
        assert lines[-1].name == "Not charged"
