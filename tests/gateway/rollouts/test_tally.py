"""What is counted of a request that ended at a revision: streams and whole answers apart, and no request twice."""

from gateway.request import Outcome
from gateway.rollouts.comparison import bucket_of
from gateway.rollouts.tally import ANSWER, BETWEEN, ERRORS, FIRST, REQUESTS, Tally
from gateway.want import Ended


def counted(outcome: Outcome, end: Ended) -> dict[tuple[str, int], int]:
    tally = Tally()
    tally.ended("new", outcome, end, code=None)
    return {(measure, bucket): count for (_, measure, bucket), count in tally.take().items()}


def test_a_stream_is_counted_by_its_first_token_and_the_time_between() -> None:
    seen = counted(Outcome.FINISHED, Ended(10, 5, first_s=0.2, between_s=0.02, whole_s=0.4))
    assert seen == {(REQUESTS, 0): 1, (FIRST, bucket_of(0.2)): 1, (BETWEEN, bucket_of(0.02)): 1}


def test_a_whole_answer_is_counted_by_its_time_by_the_token() -> None:
    seen = counted(Outcome.FINISHED, Ended(10, 5, whole_s=0.4))
    assert seen == {(REQUESTS, 0): 1, (ANSWER, bucket_of(0.04)): 1}


def test_an_answer_without_a_token_has_no_time_by_the_token() -> None:
    assert counted(Outcome.FINISHED, Ended(0, 5, whole_s=0.4)) == {(REQUESTS, 0): 1}


def test_what_failed_is_no_time() -> None:
    seen = counted(Outcome.UPSTREAM_FAILED, Ended(10, 5, first_s=0.2, whole_s=0.4))
    assert seen == {(REQUESTS, 0): 1, (ERRORS, 0): 1}
