"""Learned output lengths: tables are distributions, history replaces the prior, memory is bounded."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.lengths import EDGES, LengthHistogram, LengthKey, OutputLengths, always, bucket_of

STEPS = (0, 1, 2, 4, 8, 16, 64, 256, 1024, 4096)


def key(tenant: str = "a", ceiling: int = 4096) -> LengthKey:
    return LengthKey("m", tenant, "chat", bucket_of(ceiling))


def learned(lengths: list[int], tenant: str = "a") -> OutputLengths:
    outputs = OutputLengths()
    for length in lengths:
        outputs.observe(key(tenant), length)
    return outputs


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=300),
    produced=st.integers(0, 4095),
    ceiling=st.integers(1, 4096),
)
def test_what_remains_is_a_distribution_that_ends_at_the_ceiling(
    lengths: list[int], produced: int, ceiling: int
) -> None:
    produced = min(produced, ceiling - 1)
    distribution = learned(lengths).distribution(key(), ceiling=ceiling)
    shares = distribution.still_running(produced, STEPS)
    assert shares[0] == pytest.approx(1.0)
    assert all(0.0 <= share <= 1.0 + 1e-9 for share in shares)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(shares))
    assert all(share == 0.0 for step, share in zip(STEPS, shares, strict=True) if produced + step >= max(ceiling, 1))


@given(lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=300), share=st.floats(0.0, 1.0))
def test_a_quantile_is_passed_by_the_rest(lengths: list[int], share: float) -> None:
    distribution = learned(lengths).distribution(key(), ceiling=4096)
    length = distribution.quantile(share)
    assert 1 <= length <= 4096
    assert distribution.longer_than(length) <= 1 - share + 1e-9
    assert length == 1 or distribution.longer_than(length - 1) >= 1 - share - 1e-9


def test_quantiles_rise() -> None:
    draw = random.Random(1)
    distribution = learned([draw.randint(1, 2000) for _ in range(500)]).distribution(key(), ceiling=4096)
    quantiles = [distribution.quantile(share / 100) for share in range(101)]
    assert quantiles == sorted(quantiles)
    assert quantiles[50] == pytest.approx(1000, rel=0.15)


def test_without_history_a_request_reaches_its_ceiling() -> None:
    distribution = OutputLengths().distribution(key(), ceiling=700)
    assert distribution.quantile(0.01) == 700
    assert distribution.longer_than(699) == 1.0
    assert distribution.longer_than(700) == 0.0


def test_little_history_leaves_weight_on_the_ceiling_and_much_takes_it_away() -> None:
    few = learned([10] * 16).distribution(key(), ceiling=1000)
    many = learned([10] * 600).distribution(key(), ceiling=1000)
    assert few.longer_than(500) > 0.5
    assert many.longer_than(500) == pytest.approx(0.0, abs=1e-9)


def test_a_tenant_without_history_leans_on_the_model_and_one_with_history_on_its_own() -> None:
    outputs = learned([1000] * 500, tenant="long")
    assert outputs.distribution(key("new"), ceiling=4096).quantile(0.5) > 700
    for _ in range(600):
        outputs.observe(key("short"), 10)
    assert outputs.distribution(key("short"), ceiling=4096).quantile(0.5) <= 12
    assert outputs.distribution(key("long"), ceiling=4096).quantile(0.5) > 700


def test_old_lengths_fade() -> None:
    outputs = learned([2000] * 3000)
    for _ in range(3000):
        outputs.observe(key(), 20)
    assert outputs.distribution(key(), ceiling=4096).longer_than(1000) < 0.1


def test_a_request_that_outlived_its_history_is_taken_to_last_as_long_again() -> None:
    distribution = learned([10] * 1000).distribution(key(), ceiling=4096)
    assert distribution.still_running(500, (0, 499, 501)) == [1.0, 1.0, 0.0]


def test_the_least_used_keys_are_forgotten_and_the_model_wide_history_stays() -> None:
    outputs = OutputLengths(keys_max=10)
    for number in range(100):
        for _ in range(10):
            outputs.observe(key(f"tenant-{number}"), 10)
    assert len(outputs) <= 10
    assert outputs.distribution(key("unseen"), ceiling=4096).quantile(0.5) <= 12


def test_a_request_without_output_teaches_nothing() -> None:
    assert len(learned([0])) == 0


def test_a_long_history_neither_overflows_nor_loses_its_shape() -> None:
    histogram = LengthHistogram()
    for number in range(60_000):
        histogram.add(10 if number % 2 else 100)
    table = histogram.survival()
    assert 0.4 < table[EDGES.index(48)] < 0.6
    assert histogram.weight < 1100


def test_a_known_length_is_certain() -> None:
    known = always(300)
    assert known.longer_than(299) == 1.0
    assert known.longer_than(300) == 0.0
    assert known.quantile(0.05) == 300


def test_waits_are_predicted_by_a_guess_until_a_median_is_known() -> None:
    assert OutputLengths().typical(key(), ceiling=4096) == 256
    assert OutputLengths().typical(key(), ceiling=100) == 100
    assert learned([20] * 600).typical(key(), ceiling=4096) <= 24
