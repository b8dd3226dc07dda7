"""Is the new revision as good? Harm is found, chance is not taken for it, and nothing is promoted unseen."""

import random
from dataclasses import replace

import pytest

from gateway.rollouts.comparison import (
    Limits,
    Sample,
    Verdict,
    bucket_end_s,
    bucket_of,
    judge,
)

LIMITS = Limits(requests_min=500, errors_more=0.01, first_slower=0.2, between_slower=0.2, answer_slower=0.2)


def sample(
    requests: int,
    errors: int = 0,
    *,
    first_s: float = 0.2,
    between_s: float = 0.02,
    whole: int = 0,
    answer_s: float = 0.03,
    seed: int = 1,
) -> Sample:
    """whole: so many of them are no streams, and take answer_s by the token."""
    drawn = random.Random(seed)
    seen = Sample(requests, errors)
    for number in range(requests - errors):
        streamed = ((seen.first, first_s), (seen.between, between_s))
        for histogram, seconds in ((seen.answer, answer_s),) if number < whole else streamed:
            bucket = bucket_of(seconds * drawn.lognormvariate(0, 0.3))
            histogram[bucket] = histogram.get(bucket, 0) + 1
    return seen


def verdict(old: Sample, new: Sample, evaluation: float | None = None, limits: Limits = LIMITS) -> Verdict:
    return judge(old, new, limits, evaluation).verdict


class TestHarm:
    @pytest.mark.parametrize("errors", [3, 5, 20])
    def test_a_revision_that_only_fails_is_taken_back_after_a_few_requests(self, errors: int) -> None:
        assert verdict(sample(200), Sample(errors, errors)) is Verdict.ROLLBACK

    def test_one_failure_alone_is_not_harm(self) -> None:
        assert verdict(sample(200), Sample(1, 1)) is Verdict.HOLD

    def test_failures_that_both_have_are_not_the_new_ones(self) -> None:
        assert verdict(sample(4_000, 400), sample(600, 60, seed=2)) is not Verdict.ROLLBACK

    def test_a_slower_first_token_is_harm(self) -> None:
        found = judge(sample(2_000), sample(300, first_s=0.3, seed=2), LIMITS, None)
        assert found.verdict is Verdict.ROLLBACK
        assert found.why.startswith("first_token: ")
        assert found.why.endswith("worse than allowed")

    def test_slower_tokens_are_harm(self) -> None:
        assert verdict(sample(2_000), sample(300, between_s=0.03, seed=2)) is Verdict.ROLLBACK

    def test_a_revision_that_is_faster_is_not(self) -> None:
        assert verdict(sample(2_000), sample(600, first_s=0.1, between_s=0.01, seed=2)) is Verdict.PROMOTE

    def test_nothing_to_compare_with_is_no_harm_by_time(self) -> None:
        assert verdict(Sample(), sample(300)) is Verdict.HOLD


class TestAsGood:
    def test_equals_are_promoted_once_there_are_enough_requests(self) -> None:
        assert verdict(sample(4_000), sample(499, seed=2)) is Verdict.HOLD
        assert verdict(sample(4_000), sample(500, seed=2)) is Verdict.PROMOTE

    def test_a_little_slower_than_allowed_is_neither(self) -> None:
        found = judge(sample(4_000), sample(600, first_s=0.25, seed=2), LIMITS, None)
        assert found.verdict is Verdict.HOLD
        assert "first_token" in found.why

    def test_few_failures_more_wait_for_more_requests(self) -> None:
        assert verdict(sample(4_000), sample(500, 5, seed=2)) is Verdict.HOLD

    def test_an_evaluation_that_is_asked_for_is_waited_for_and_decides(self) -> None:
        limits = replace(LIMITS, evaluation_min=0.9)
        old, new = sample(4_000), sample(600, seed=2)
        judged = [verdict(old, new, score, limits) for score in (None, 0.95, 0.8)]
        assert judged == [Verdict.HOLD, Verdict.PROMOTE, Verdict.ROLLBACK]


class TestWholeAnswers:
    def test_a_model_without_streams_is_promoted_and_taken_back_by_its_whole_answers(self) -> None:
        old, new = sample(4_000, whole=4_000), sample(500, whole=500, seed=2)
        found = judge(old, new, LIMITS, None)
        assert found.verdict is Verdict.PROMOTE
        assert [finding.measure for finding in found.findings] == ["errors", "answer_by_token"]
        slower = judge(old, sample(300, whole=300, answer_s=0.045, seed=2), LIMITS, None)
        assert slower.verdict is Verdict.ROLLBACK
        assert slower.why.startswith("answer_by_token: ")

    def test_another_share_of_streams_is_no_difference(self) -> None:
        old, new = sample(4_000, whole=400, answer_s=1.0), sample(800, whole=600, answer_s=1.0, seed=2)
        found = judge(old, new, LIMITS, None)
        assert (found.verdict, len(found.findings)) == (Verdict.PROMOTE, 4)

    def test_streams_of_the_old_one_and_whole_answers_of_the_new_one_are_not_compared(self) -> None:
        found = judge(sample(4_000), sample(600, whole=600, answer_s=9.0, seed=2), LIMITS, None)
        assert (found.verdict, any(finding.harm for finding in found.findings)) == (Verdict.HOLD, False)

    def test_a_kind_that_is_rare_is_not_waited_for_and_its_harm_counts(self) -> None:
        old, new = sample(4_000, whole=100), sample(600, whole=10, seed=2)
        assert verdict(old, new) is Verdict.PROMOTE
        assert verdict(old, sample(600, whole=60, seed=2)) is Verdict.PROMOTE
        assert verdict(old, sample(2_000, whole=90, answer_s=0.1, seed=2)) is Verdict.ROLLBACK


def test_equal_revisions_that_are_looked_at_every_few_requests_are_seldom_taken_back() -> None:
    """Each look is another chance to err: over 40 rollouts of 15 looks each at most one does."""
    drawn, wrong = random.Random(7), 0
    for _ in range(40):
        old, new = Sample(), Sample()
        for _ in range(15):
            for seen, requests in ((old, 90), (new, 10)):
                seen.requests += requests
                for _ in range(requests):
                    if drawn.random() < 0.02:
                        seen.errors += 1
                    else:
                        bucket = bucket_of(drawn.lognormvariate(-2, 0.5))
                        seen.first[bucket] = seen.first.get(bucket, 0) + 1
            if verdict(old, new) is Verdict.ROLLBACK:
                wrong += 1
                break
    assert wrong <= 1, f"{wrong} of 40"


@pytest.mark.parametrize("seconds", [0.00005, 0.0001, 0.0007, 0.02, 1.0, 59.0, 100.0])
def test_a_bucket_ends_at_most_a_twentieth_later(seconds: float) -> None:
    end = bucket_end_s(bucket_of(seconds))
    assert max(seconds, 1e-4) <= end * 1.000001 <= max(seconds, 1e-4) * 1.0501
