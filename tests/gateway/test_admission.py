"""How long an output may be, and what can never fit."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import admission
from gateway.errors import AnswerTooLarge, PromptTooLong


@pytest.mark.parametrize(
    ("sampling", "per_output"),
    [
        ({"logprobs": True, "top_logprobs": 20}, 21),
        ({"logprobs": True}, 1),
        ({"logprobs": 5}, 6),
        ({"logprobs": 0}, 1),
    ],
)
def test_log_probabilities_that_do_not_fit_are_refused(sampling: dict[str, object], per_output: int) -> None:
    fits = 1_000 // per_output
    bytes_max = 1_000 * admission.LOGPROB_BYTES
    admission.refuse_too_large(sampling, outputs=fits, bytes_max=bytes_max)
    with pytest.raises(AnswerTooLarge, match=f"{(fits + 1) * per_output} log-probabilities"):
        admission.refuse_too_large(sampling, outputs=fits + 1, bytes_max=bytes_max)


def test_without_log_probabilities_none_are_refused() -> None:
    for sampling in ({}, {"logprobs": False}):
        admission.refuse_too_large(sampling, outputs=10**9, bytes_max=1)


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

    @pytest.mark.parametrize(
        ("limits", "said"),
        [
            ({"context_tokens": 64, "pool_tokens": 4096}, "at most 63 (its context less one token of output)."),
            ({"context_tokens": 4096, "pool_tokens": 64}, "at most 63 (its cache less one token of output)."),
            (
                {"context_tokens": 4096, "pool_tokens": 4096, "prompt_tokens_max": 80},
                "at most 80 (the cache of what computes its prompts).",
            ),
        ],
    )
    def test_what_sets_the_limit_is_said(self, limits: dict[str, int], said: str) -> None:
        with pytest.raises(PromptTooLong, match=re.escape(f"The prompt has 99 tokens; this model takes {said}")):
            admission.output_cap(requested=5, prompt_tokens=99, output_tokens_max=64, **limits)

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


@given(tokens=st.integers(0, 10**9), page=st.integers(1, 4096))
def test_sizes_round_up_to_whole_pages(tokens: int, page: int) -> None:
    pages = admission.pages_for(tokens, page)
    assert (pages - 1) * page < tokens <= pages * page or (tokens, pages) == (0, 0)
