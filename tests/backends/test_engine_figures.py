"""Figures from an engine's metrics: SGLang's lines, several ranks, the plugin's lines, and what is none of them."""

import pytest

from backends.engine_figures import EngineFigures, read_figures
from backends.errors import EngineBroke

_LABELS = 'engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0"'


def _line(name: str, value: float, **ranks: int) -> str:
    more = "".join(f',{rank}="{number}"' for rank, number in ranks.items())
    return f"{name}{{{_LABELS}{more}}} {value}\n"


def test_what_sglang_says_is_read_and_what_it_does_not_say_is_unknown() -> None:
    text = (
        "# HELP sglang:kv_evictable_tokens Number of evictable (radix-cached) token slots.\n"
        "# TYPE sglang:kv_evictable_tokens gauge\n"
        + _line("sglang:kv_evictable_tokens", 59.0, tp_rank=0)
        + _line("sglang:swa_evictable_tokens", 7.0, tp_rank=0)
        + _line("sglang:num_retracted_reqs", 2.0, tp_rank=0)
        + _line("sglang:num_retracted_requests_total", 7.0, tp_rank=0)
    )
    assert read_figures(text) == EngineFigures(evictable_tokens=59, retracted_waiting=2, retractions=7)


def test_tensor_parallel_ranks_speak_of_one_pool_and_data_parallel_ranks_of_several() -> None:
    text = "".join(
        _line("sglang:kv_evictable_tokens", 10.0 * (rank + 1), tp_rank=copy, dp_rank=rank)
        for rank in (0, 1)
        for copy in (0, 1)
    )
    assert read_figures(text).evictable_tokens == 30
    assert read_figures(text, 1).evictable_tokens == 20


def test_the_counts_of_page_tags_are_the_engines_whoever_asks() -> None:
    text = (
        "pagegate:page_tags_active 1.0\npagegate:page_tags_pairs_checked_total 1.234e+06\n"
        "pagegate:page_tags_requests_aborted_total 3.0\npagegate:page_tags_pages_quarantined 4.0\n"
    )
    expected = EngineFigures(tags_active=1, pages_checked=1_234_000, tag_aborts=3, pages_quarantined=4)
    assert read_figures(text) == read_figures(text, 1) == expected


@pytest.mark.parametrize("text", ["", "<html>busy</html>", "sglang:other 1\n"])
def test_a_text_without_these_figures_says_nothing(text: str) -> None:
    assert read_figures(text) == EngineFigures()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
def test_a_figure_that_is_no_count_is_the_engines_fault(value: str) -> None:
    with pytest.raises(EngineBroke):
        read_figures(f"sglang:kv_evictable_tokens {value}\n")
