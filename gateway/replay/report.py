"""What a replay has shown, as plain figures: goodput, latencies, waste, fairness, honesty, coverage."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gateway.replay.doors import Promise
from gateway.replay.our_door import OurDoor
from gateway.replay.requests import Fate, SimulatedRequest
from gateway.replay.simulation import Played


@dataclass(frozen=True, slots=True)
class Report:
    """Times in seconds. good: requests that kept the promise; goodput_s: those per second of the trace.

    retracted_share: of decoded tokens, those that were thrown away. jain: over tenants, of what each was served against
    its max-min fair share of all that was served. honest_share: of the clients that came again when they were told,
    those that were let in and served; it and covered_share are None for doors that promise nothing. A client that came
    again counts by its second request.
    """

    policy: str
    requests: int
    good: int
    good_share: float
    goodput_s: float
    finished: int
    refused: int
    evicted: int
    first_p50_s: float
    first_p95_s: float
    first_p99_s: float
    between_p50_s: float
    between_p95_s: float
    between_p99_s: float
    decoded_tokens: int
    retractions: int
    retracted_share: float
    wasted_tokens: int
    engine_queued_share: float
    late_starts: int
    jain: float
    honest_share: float | None
    honest_asked: int
    covered_share: float | None
    covered_decisions: int
    drift_share: float | None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all don't pass; 0 of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def jain_index(shares: Sequence[float]) -> float:
    """1 if all are equal, 1/n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def fair_shares(demands: Mapping[str, float], served: float) -> dict[str, float]:
    """Max-min fair division of `served` among demands: nobody gets more than it asked for, the rest is level."""
    fair: dict[str, float] = {}
    left = served
    for index, (tenant, demand) in enumerate(sorted(demands.items(), key=lambda item: (item[1], item[0]))):
        fair[tenant] = min(demand, left / (len(demands) - index))
        left -= fair[tenant]
    return fair


def report(policy: str, played: Played, promise: Promise) -> Report:
    requests, totals = [request.answered for request in played.requests], played.engine.totals
    good = sum(promise.kept_by(request) for request in requests)
    first = [request.first_s for request in requests if request.first_s is not None]
    between = [request.between_s for request in requests if request.between_s is not None]
    sent = [request for request in requests if request.sent_at is not None]
    retries = [request for request in requests if request.origin]
    length_s = max(1e-9, played.requests[-1].arrived_at - played.requests[0].arrived_at) if requests else 1.0
    door = played.door if isinstance(played.door, OurDoor) else None
    return Report(
        policy=policy,
        requests=len(requests),
        good=good,
        good_share=good / max(1, len(requests)),
        goodput_s=good / length_s,
        finished=sum(request.fate is Fate.FINISHED for request in requests),
        refused=sum(request.fate is Fate.REFUSED for request in requests),
        evicted=sum(request.fate is Fate.EVICTED for request in requests),
        first_p50_s=percentile(first, 0.5),
        first_p95_s=percentile(first, 0.95),
        first_p99_s=percentile(first, 0.99),
        between_p50_s=percentile(between, 0.5),
        between_p95_s=percentile(between, 0.95),
        between_p99_s=percentile(between, 0.99),
        decoded_tokens=totals.decoded_tokens,
        retractions=totals.retractions,
        retracted_share=totals.retracted_tokens / max(1, totals.decoded_tokens),
        wasted_tokens=totals.wasted_tokens,
        engine_queued_share=played.engine_queued / max(1, len(sent)),
        late_starts=sum((request.sent_at or 0.0) - request.arrived_at > promise.first_s for request in sent),
        jain=_jain(requests),
        honest_share=_finished_share(retries) if door else None,
        honest_asked=len(retries),
        covered_share=door.placing.coverage.share if door else None,
        covered_decisions=door.placing.coverage.decisions if door else 0,
        drift_share=door.gate.drift.deviation if door else None,
    )


def _finished_share(requests: Sequence[SimulatedRequest]) -> float:
    """1 of none."""
    return sum(request.fate is Fate.FINISHED for request in requests) / len(requests) if requests else 1.0


def _jain(requests: Sequence[SimulatedRequest]) -> float:
    """Of prompt and output tokens served. A tenant that got all it asked for is served fairly, however little."""
    demands: dict[str, float] = {}
    served: dict[str, float] = {}
    for request in requests:
        tokens = request.prompt_tokens + request.output_tokens
        demands[request.tenant] = demands.get(request.tenant, 0.0) + tokens
        served[request.tenant] = served.get(request.tenant, 0.0) + tokens * (request.fate is Fate.FINISHED)
    fair = fair_shares(demands, sum(served.values()))
    return jain_index([served[tenant] / fair[tenant] for tenant in demands if fair[tenant] > 0])


def tenant_first_s(requests: Sequence[SimulatedRequest], *, without: str) -> list[float]:
    """Times to the first token of all tenants but one."""
    return [request.first_s for request in requests if request.first_s is not None and request.tenant != without]
