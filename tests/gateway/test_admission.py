"""Whether a request fits, how long its output may be, and what a refused client is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import admission
from gateway.admission import Capacity, Verdict
from gateway.errors import PromptTooLong


def capacity(**changes: int) -> Capacity:
    fields = {
        "total_pages": 100,
        "used_pages": 0,
        "held_pages": 0,
        "unseen_pages": 0,
        "running": 0,
        "running_max": 8,
    }
    return Capacity(**(fields | changes))


class TestOutputCap:
    def test_default_is_the_least_of_model_limit_context_and_pool(self) -> None:
        cap = admission.output_cap(
            requested=None, prompt_tokens=100, output_tokens_max=8192, context_tokens=8192, pool_tokens=1000
        )
        assert (cap.tokens, cap.clamped) == (900, False)

    def test_an_explicit_larger_request_is_clamped_and_says_so(self) -> None:
        cap = admission.output_cap(
            requested=999_999_999, prompt_tokens=100, output_tokens_max=500, context_tokens=8192, pool_tokens=9000
        )
        assert (cap.tokens, cap.clamped) == (500, True)

    def test_a_prompt_that_leaves_room_for_one_token_passes_and_one_more_is_refused(self) -> None:
        limits = {"requested": 5, "output_tokens_max": 64, "context_tokens": 64, "pool_tokens": 4096}
        assert admission.output_cap(prompt_tokens=63, **limits).tokens == 1
        with pytest.raises(PromptTooLong) as refused:
            admission.output_cap(prompt_tokens=64, **limits)
        assert (refused.value.prompt_tokens, refused.value.limit_tokens) == (64, 63)

    @given(
        requested=st.none() | st.integers(1, 10**9),
        prompt=st.integers(1, 10_000),
        output=st.integers(1, 10_000),
        context=st.integers(1, 10_000),
        pool=st.integers(1, 10_000),
    )
    def test_prompt_and_output_always_fit_together(
        self, requested: int | None, prompt: int, output: int, context: int, pool: int
    ) -> None:
        try:
            cap = admission.output_cap(
                requested=requested,
                prompt_tokens=prompt,
                output_tokens_max=output,
                context_tokens=context,
                pool_tokens=pool,
            )
        except PromptTooLong:
            assert prompt >= min(context, pool)
        else:
            assert 1 <= cap.tokens <= min(output, requested or output)
            assert prompt + cap.tokens <= min(context, pool)


class TestVerdict:
    def test_a_replica_without_a_report_is_unknown_and_not_idle(self) -> None:
        assert admission.verdict(1, None) is Verdict.UNKNOWN

    def test_the_crossing_requests_own_size_counts(self) -> None:
        almost_full = capacity(held_pages=99)
        assert admission.verdict(1, almost_full) is Verdict.FITS_NOW
        assert admission.verdict(2, almost_full) is Verdict.FITS_LATER

    def test_work_that_only_the_engine_knows_of_counts_as_taken(self) -> None:
        assert admission.verdict(20, capacity(used_pages=99, held_pages=10)) is Verdict.FITS_LATER

    def test_holds_that_the_snapshot_cannot_have_seen_are_added_to_it(self) -> None:
        assert capacity(used_pages=50, held_pages=60, unseen_pages=30).free_pages == 20

    def test_a_replica_with_all_its_running_slots_taken_is_full(self) -> None:
        assert admission.verdict(1, capacity(running=8)) is Verdict.FITS_LATER


class TestPagesNeeded:
    def test_every_choice_rounds_up_and_counts(self) -> None:
        need = admission.pages_needed(
            prompt_tokens=17, cap_tokens=8, choices=3, outputs_ahead=1024, page_tokens=16, total_pages=1000
        )
        assert need == 3 * 2

    def test_outputs_beyond_the_next_step_are_not_held_yet(self) -> None:
        need = admission.pages_needed(
            prompt_tokens=16, cap_tokens=100_000, choices=1, outputs_ahead=1024, page_tokens=16, total_pages=10_000
        )
        assert need == 1 + 64

    def test_never_more_than_the_whole_pool_so_that_an_idle_replica_always_takes_it(self) -> None:
        need = admission.pages_needed(
            prompt_tokens=100, cap_tokens=1000, choices=8, outputs_ahead=1024, page_tokens=16, total_pages=100
        )
        assert admission.verdict(need, capacity()) is Verdict.FITS_NOW


@given(
    ahead=st.integers(0, 10_000),
    running=st.integers(0, 1000),
    mean=st.floats(0, 10_000),
    jitter=st.floats(0, 1, exclude_max=True),
    most=st.integers(1, 600),
)
def test_retry_after_is_a_bounded_integer_of_at_least_one(
    ahead: int, running: int, mean: float, jitter: float, most: int
) -> None:
    seconds = admission.retry_after_s(ahead=ahead, running=running, mean_duration_s=mean, jitter=jitter, most_s=most)
    assert isinstance(seconds, int)
    assert 1 <= seconds <= most


def test_retry_after_grows_with_those_who_wait() -> None:
    few, many = (
        admission.retry_after_s(ahead=ahead, running=4, mean_duration_s=2.0, jitter=0.0, most_s=600)
        for ahead in (3, 399)
    )
    assert (few, many) == (2, 200)
