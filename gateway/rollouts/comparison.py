"""Is the new revision as good as the old one? Pure: counts and histograms in, a verdict with its numbers out.

Compared are failed requests and times, each with a bound of confidence: of streams the time to the first token and the
mean time between tokens; of whole answers, where neither can be seen, the time by the token. The two kinds are never
mixed, so that it does not matter how many of which a revision happens to get. Harm is looked for all the time, and a
rollout that harms nobody must not be ended by chance: its bound is strict. That it is as good is asked once enough
requests are there, with the usual bound. Whatever is neither waits for more requests.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

# One-sided, in standard deviations: for harm 1 in 2,000 at each look, for as good 1 in 20.
HARM_Z: Final = 3.29
_HARM_CHANCE: Final = 1 / 2_000
GOOD_Z: Final = 1.645
_QUANTILE: Final = 0.9
# What fewer requests have, one in so many, may harm and need not be found as good: that could take for ever.
_RARE: Final = 20
# Histograms: a bucket is 5 % wide, from 0.1 ms to some minutes; kept counts are by their number, so they never change.
_FIRST_S: Final = 1e-4
_RATIO: Final = 1.05
BUCKET_MAX: Final = 300


class Verdict(Enum):
    HOLD = "hold"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still as good, as shares: 0.01 failed requests more, times 0.2 longer. requests_min: of the new one.

    evaluation_min: the score it must reach, None where no evaluation is asked for.
    """

    requests_min: int
    errors_more: float
    first_slower: float
    between_slower: float
    answer_slower: float
    evaluation_min: float | None = None


@dataclass(slots=True)
class Sample:
    """What was seen of one revision. requests: that ended, failed or not. By bucket, how many of them: first and
    between are of streams, answer is of whole answers.
    """

    requests: int = 0
    errors: int = 0
    first: dict[int, int] = field(default_factory=dict)
    between: dict[int, int] = field(default_factory=dict)
    answer: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One measure. old, new: as seen; None without requests. harm, good: surely worse than allowed, surely not.

    rare: so few requests have it that it is not waited for.
    """

    measure: str
    old: float | None
    new: float | None
    harm: bool
    good: bool
    rare: bool = False

    def __str__(self) -> str:
        word = (
            "worse than allowed"
            if self.harm
            else "as good"
            if self.good
            else "too rare"
            if self.rare
            else "not known yet"
        )
        return f"{self.measure}: {_shown(self.measure, self.old)} → {_shown(self.measure, self.new)}, {word}"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    why: str
    findings: tuple[Finding, ...]


def bucket_of(seconds: float) -> int:
    if seconds <= _FIRST_S:
        return 0
    return min(BUCKET_MAX, math.ceil(math.log(seconds / _FIRST_S) / math.log(_RATIO)))


def bucket_end_s(bucket: int) -> float:
    return _FIRST_S * _RATIO**bucket


def judge(old: Sample, new: Sample, limits: Limits, evaluation: float | None) -> Judgement:
    """evaluation: the score that somebody noted for the new revision, None if nobody did."""
    findings = (
        _errors(old, new, limits.errors_more),
        *_all_times(old, new, limits),
        *_evaluated(limits.evaluation_min, evaluation),
    )
    if harms := [str(finding) for finding in findings if finding.harm]:
        return Judgement(Verdict.ROLLBACK, "; ".join(harms), findings)
    if new.requests < limits.requests_min:
        return Judgement(Verdict.HOLD, f"{new.requests} of {limits.requests_min} requests", findings)
    if open_ones := [str(finding) for finding in findings if not (finding.good or finding.rare)]:
        return Judgement(Verdict.HOLD, "; ".join(open_ones), findings)
    return Judgement(Verdict.PROMOTE, f"as good in all, over {new.requests} requests", findings)


def _errors(old: Sample, new: Sample, more: float) -> Finding:
    """Harm by the exact tail, which holds for two requests as for many. As good by the difference of two shares, by
    Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10).
    """
    if not old.requests or not new.requests:
        return Finding("errors", _share(old), _share(new), harm=False, good=False)
    _, was_high = _wilson(old.errors, old.requests, GOOD_Z)
    by_chance = _at_least(new.errors, new.requests, min(1.0, was_high + more))
    good = _at_most_more(old, new, GOOD_Z) <= more
    return Finding("errors", _share(old), _share(new), harm=by_chance < _HARM_CHANCE, good=good)


def _at_least(count: int, of: int, share: float) -> float:
    """The probability of so many of so many, each with this share."""
    if count <= of * share:
        return 1.0
    logarithm = math.lgamma(of + 1) - math.lgamma(count + 1) - math.lgamma(of - count + 1)
    term = total = math.exp(logarithm + count * math.log(share) + (of - count) * math.log1p(-share))
    while count < of and term > total * 1e-6:
        term *= (of - count) / (count + 1) * share / (1 - share)
        total += term
        count += 1
    return total


def _share(sample: Sample) -> float | None:
    return sample.errors / sample.requests if sample.requests else None


def _at_most_more(old: Sample, new: Sample, z: float) -> float:
    """The new one's share less the old one's, at most."""
    was, now = old.errors / old.requests, new.errors / new.requests
    was_low, _ = _wilson(old.errors, old.requests, z)
    _, now_high = _wilson(new.errors, new.requests, z)
    return now - was + math.hypot(now_high - now, was - was_low)


def _wilson(count: int, of: int, z: float) -> tuple[float, float]:
    """Wilson's score interval of a share, which also holds for few and for none."""
    share, spread = count / of, z * z / of
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / of + spread / of / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def _all_times(old: Sample, new: Sample, limits: Limits) -> Iterator[Finding]:
    """Of what there is: a model whose answers are all whole has no time to a first token."""
    requests = old.requests - old.errors + new.requests - new.errors
    for measure, was, now, slower in (
        ("first_token", old.first, new.first, limits.first_slower),
        ("between_tokens", old.between, new.between, limits.between_slower),
        ("answer_by_token", old.answer, new.answer, limits.answer_slower),
    ):
        if seen := sum(was.values()) + sum(now.values()):
            yield _times(measure, was, now, slower, rare=seen * _RARE < requests)


def _times(measure: str, old: Mapping[int, int], new: Mapping[int, int], slower: float, *, rare: bool) -> Finding:
    """By order statistics: the quantile's rank, and ranks that it lies between with the bound's probability."""
    was, now = _quantile_s(old, _QUANTILE), _quantile_s(new, _QUANTILE)
    if was is None or now is None:
        return Finding(measure, was, now, harm=False, good=False, rare=rare)
    allowed = 1 + slower
    surely_slower = _low_s(new, HARM_Z) > _high_s(old, HARM_Z) * allowed
    surely_not = _high_s(new, GOOD_Z) <= _low_s(old, GOOD_Z) * allowed * _RATIO
    return Finding(measure, was, now, harm=surely_slower, good=surely_not, rare=rare)


def _low_s(counts: Mapping[int, int], z: float) -> float:
    """The beginning of the bucket: what is there took longer. 0 if the ranks leave it open."""
    bucket = _at_rank(counts, _rank(counts, _QUANTILE, -z))
    return 0.0 if bucket is None else bucket_end_s(bucket - 1)


def _high_s(counts: Mapping[int, int], z: float) -> float:
    bucket = _at_rank(counts, _rank(counts, _QUANTILE, z))
    return math.inf if bucket is None else bucket_end_s(bucket)


def _quantile_s(counts: Mapping[int, int], quantile: float) -> float | None:
    bucket = _at_rank(counts, _rank(counts, quantile, 0.0))
    return None if bucket is None else bucket_end_s(bucket)


def _rank(counts: Mapping[int, int], quantile: float, z: float) -> int:
    total = sum(counts.values())
    return math.ceil(total * quantile + z * math.sqrt(total * quantile * (1 - quantile)))


def _at_rank(counts: Mapping[int, int], rank: int) -> int | None:
    """The bucket of the rank-th smallest; None where there is none."""
    if rank < 1:
        return None
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return bucket
    return None


def _evaluated(least: float | None, score: float | None) -> Iterator[Finding]:
    if least is not None:
        known = score is not None
        yield Finding("evaluation", least, score, harm=known and score < least, good=known and score >= least)  # type: ignore[operator]  # known


def _shown(measure: str, figure: float | None) -> str:
    if figure is None:
        return "none"
    if measure == "errors":
        return f"{figure * 100:.2f} %"
    return f"{figure:g}" if measure == "evaluation" else f"{figure * 1000:.1f} ms"
