"""How cost and quality of decisions grow with a fleet: many replicas in regions, many gateways with delayed reports.

    .venv/bin/python -m benchmarks.admission_fleet [--replicas 1000] [--regions 4] [--gateways 64] [--delay-s 0.2]

Each gateway places requests at the replicas of its region by the service's own placing, knowing its own requests at
once and everybody's by reports that come every 0.2 s and are older by --delay-s. Requests hold their prompt and grow by
a token every 10 ms until they end; arrivals fill --load of all pages. Printed: CPU time of a decision; over-full, the
part of admissions after which a replica truly held more than its pool; blind, the part of refusals though some replica
of the region had room; and how evenly pages are used. There is no board of claims here: this is what reports alone do.
`--gateways` equal to `--regions` is the same without rivals.
"""

import argparse
import heapq
import random
import time
from dataclasses import dataclass, field

from gateway.gate import EngineReport, GateLimits
from gateway.placing import Ended, Placing, PlacingLimits, Want

POOL_TOKENS = 144_348
STEP_S = 0.01
REPORT_S = 0.2
LIMITS = GateLimits(prefill_chunk_tokens=1 << 30, running_max=1024, engine_clip_tokens=0)
MEAN_OUTPUT = 300
CEILING = 2048


@dataclass(slots=True)
class Truth:
    """One replica as it is. Every running request has its prompt, and a token more with every step."""

    prompts: int = 0
    running: int = 0
    started_sum: float = 0.0  # of the running requests' start times

    def used(self, now: float) -> int:
        return self.prompts + int((self.running * now - self.started_sum) / STEP_S)


@dataclass(slots=True)
class Counts:
    admitted: int = 0
    over_full: int = 0
    refused: int = 0
    blind: int = 0
    times_us: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--regions", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=64)
    parser.add_argument("--delay-s", type=float, default=0.2)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    began = time.process_time()
    counts, spread = run(options)
    counts.times_us.sort()
    decisions = len(counts.times_us)
    print(
        f"{options.replicas} replicas, {options.regions} regions, {options.gateways} gateways, reports "
        f"{options.delay_s:.1f} s late, load {options.load:.2f}: {decisions} decisions in "
        f"{time.process_time() - began:.0f} s of CPU"
    )
    print(
        f"  a decision p50 {counts.times_us[decisions // 2]:.0f} µs, "
        f"p99 {counts.times_us[int(decisions * 0.99)]:.0f} µs; "
        f"over-full {counts.over_full / max(1, counts.admitted):.3%} of {counts.admitted} admitted; "
        f"blind {counts.blind / max(1, counts.refused):.1%} of {counts.refused} refused; "
        f"pages in use: mean {spread[0]:.0%}, fullest {spread[1]:.0%}"
    )


def run(options: argparse.Namespace) -> tuple[Counts, tuple[float, float]]:
    draw = random.Random(1)
    each = options.replicas // options.regions
    truths = [Truth() for _ in range(each * options.regions)]
    gateways = [_gateway(number % options.regions, each, draw) for number in range(options.gateways)]
    counts, ends = Counts(), list[tuple[float, int, int, int, int, float]]()
    # A request holds about its prompt and half its output, for its output's steps.
    mean_hold_s = MEAN_OUTPUT * STEP_S
    rate = options.load * len(truths) * POOL_TOKENS / ((2500 + MEAN_OUTPUT / 2) * mean_hold_s)
    now, next_report, number = 0.0, REPORT_S, 0
    history: list[tuple[float, list[int]]] = [(0.0, [0] * len(truths))]
    while now < options.seconds:
        now += draw.expovariate(rate)
        while ends and ends[0][0] <= now:
            at, which, gateway, prompt, output, started = heapq.heappop(ends)
            truth = truths[which % len(truths)]
            truth.prompts -= prompt
            truth.running -= 1
            truth.started_sum -= started
            gateways[gateway].ended(str(which // len(truths)), Ended(output, prompt, between_s=STEP_S))
            del at
        if now >= next_report:
            next_report += REPORT_S
            history.append((now, [truth.used(now) for truth in truths]))
            while len(history) > 1 and history[1][0] <= now - options.delay_s:
                history.pop(0)
            for gateway, placing in enumerate(gateways):
                _report(placing, history[0], gateway % options.regions, each, now)
        number += 1
        gateway = draw.randrange(len(gateways))
        prompt, output = 200 + int(draw.expovariate(1 / 2300)), 1 + int(draw.expovariate(1 / MEAN_OUTPUT))
        _ask(gateways[gateway], Want(str(number), "t", "chat", prompt, 1, CEILING), now, counts)
        placed = gateways[gateway].inside.get(str(number))
        region = range(gateway % options.regions * each, (gateway % options.regions + 1) * each)
        if placed is None:
            counts.blind += any(
                truths[index].used(now) + prompt + 2 * MEAN_OUTPUT < 0.9 * POOL_TOKENS for index in region
            )
            continue
        index = int(placed.site.id)
        truth = truths[index]
        truth.prompts += prompt
        truth.running += 1
        truth.started_sum += now
        counts.over_full += truth.used(now) > POOL_TOKENS
        output = min(output, CEILING)
        heapq.heappush(ends, (now + output * STEP_S, number * len(truths) + index, gateway, prompt, output, now))
    used = [truth.used(now) / POOL_TOKENS for truth in truths]
    return counts, (sum(used) / len(used), max(used))


def _ask(placing: Placing, want: Want, now: float, counts: Counts) -> None:
    began = time.thread_time_ns()
    placed = placing.place(want, now, charged_s=1.0)
    counts.times_us.append((time.thread_time_ns() - began) / 1000)
    if placed is None:
        counts.refused += 1
    else:
        counts.admitted += 1
        placing.progressed(want.request_id, 1, now)


def _gateway(region: int, each: int, draw: random.Random) -> Placing:
    placing = Placing(PlacingLimits(coverage_every=1 << 30), seed=draw.randrange(1 << 30))
    for index in range(region * each, (region + 1) * each):
        placing.join(str(index), POOL_TOKENS, 1, LIMITS)
    for number in range(100):  # a history of lengths, as after a while of service
        learned = Want(f"before{number}", "t", "chat", 10, 1, CEILING)
        placing.place(learned, 0.0, charged_s=1.0)
        placing.ended(learned.request_id, Ended(1 + int(draw.expovariate(1 / MEAN_OUTPUT)), 10, between_s=STEP_S))
    return placing


def _report(placing: Placing, snapshot: tuple[float, list[int]], region: int, each: int, now: float) -> None:
    asked_at, used = snapshot
    for index in range(region * each, (region + 1) * each):
        placing.reported(str(index), EngineReport(used[index], asked_at), now)


if __name__ == "__main__":
    main()
