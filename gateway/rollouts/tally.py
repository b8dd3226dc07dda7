"""What this process has seen of each revision since it last said so: counts, to be added to those that all share.

Runs report here as they end (gateway/run.py), only while a rollout of their model runs. What a process that is killed
had not passed on yet is lost: this is for comparing, not for billing.
"""

from collections import Counter
from dataclasses import dataclass, field

from gateway.request import Outcome
from gateway.rollouts.comparison import bucket_of
from gateway.want import Ended

REQUESTS, ERRORS, FIRST, BETWEEN, ANSWER = "requests", "errors", "first", "between", "answer"
# Ends that say something of the engine. A client that leaves and a queue that was full say nothing of either revision.
_TELLING = frozenset({Outcome.FINISHED, Outcome.UPSTREAM_FAILED, Outcome.INTEGRITY_ABORT})
# With this code an engine refuses what the gateway takes for right: a revision that does so more often is worse.
_REFUSED_BY_ENGINE = "request_refused"


@dataclass(slots=True)
class Tally:
    """counts: by revision, measure and bucket. ends: by revision and outcome, all since this process follows it."""

    counts: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)

    def ended(self, revision: str, outcome: Outcome, end: Ended, *, code: str | None) -> None:
        """A request ended so at an engine of the revision. A whole answer that came as one has no first token."""
        failed = outcome in {Outcome.UPSTREAM_FAILED, Outcome.INTEGRITY_ABORT} or code == _REFUSED_BY_ENGINE
        if not failed and outcome not in _TELLING:
            return
        if failed:
            self.failed(revision)
            return
        self.ends[revision, "good"] += 1
        self.counts[revision, REQUESTS, 0] += 1
        if end.first_s is not None:
            self.counts[revision, FIRST, bucket_of(end.first_s)] += 1
        elif end.whole_s is not None and end.produced:
            self.counts[revision, ANSWER, bucket_of(end.whole_s / end.produced)] += 1
        if end.between_s is not None:
            self.counts[revision, BETWEEN, bucket_of(end.between_s)] += 1

    def failed(self, revision: str) -> None:
        """A request failed there, or an engine of the revision could not be reached and the request went elsewhere."""
        self.ends[revision, "failed"] += 1
        self.counts[revision, REQUESTS, 0] += 1
        self.counts[revision, ERRORS, 0] += 1

    def take(self) -> Counter[tuple[str, str, int]]:
        """What is new, once."""
        new, self.counts = self.counts, Counter()
        return new
