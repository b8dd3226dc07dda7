"""The admission policies over public traces, against the figures they are to reach.

    .venv/bin/python -m benchmarks.admission_replay TRACE [--profile h200-8b-bf16] [--first-s 5] [--between-ms 50]
        [--factors 1,1.5,2,4] [--returning 0.1] [--only goodput|greedy|precisions]

At 1, 1.5, 2 and 4 times the load that the oracle sustains (the same policy, told every output's length; 99 % of
requests kept): goodput of every policy, retractions, honesty of Retry-After (one refused client in ten really comes
again when it was told), coverage of the forecast. Then one greedy tenant at ten times its share, and the same trace on
pools in bf16 and fp8. Deterministic by --seed.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from gateway.replay.doors import Promise
from gateway.replay.policies import POLICIES, Trial, play_ours, run_policy, sustainable_factor
from gateway.replay.profiles import PROFILES
from gateway.replay.report import Report, percentile, report, tenant_first_s
from gateway.replay.traces import Load, read_trace

FACTORS = (1.0, 1.5, 2.0, 4.0)
FP8_OF = {"h200-8b-bf16": "h200-8b-fp8", "k2-bf16": "k2-fp8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--profile", default="h200-8b-bf16", choices=sorted(PROFILES))
    parser.add_argument("--first-s", type=float, default=5.0)
    parser.add_argument("--between-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--factors", default=",".join(map(str, FACTORS)), help="Of the sustainable load.")
    parser.add_argument("--returning", type=float, default=0.1, help="Clients that come again when they are told.")
    parser.add_argument("--sustained", type=float, help="The sustainable load factor, if it is known.")
    parser.add_argument("--only", choices=["goodput", "greedy", "precisions"])
    options = parser.parse_args()
    trial = Trial(
        read_trace(options.trace),
        Load(seed=options.seed, returning=options.returning),
        PROFILES[options.profile],
        Promise(options.first_s, options.between_ms / 1000),
    )
    sustained = options.sustained or sustainable_factor(trial)
    print(f"{options.trace.name} on {options.profile}, seed {options.seed}: the oracle sustains × {sustained:.3f}")
    for factor in map(float, options.factors.split(",")) if options.only in {None, "goodput"} else ():
        print(f"\n× {factor} of that")
        print(
            f"{'policy':12} {'goodput/s':>9} {'of oracle':>9} {'kept':>6} {'ttft p95':>8} {'tbt p95':>8} "
            f"{'retracted':>9} {'engine-q':>8} {'jain':>5} {'honest':>13} {'covered':>7} {'cpu s':>6}"
        )
        rows = [_timed(name, trial.at(factor * sustained)) for name in POLICIES]
        oracle = next(each for each, _ in rows if each.policy == "oracle")
        for each, cpu_s in rows:
            print(_line(each, oracle, cpu_s), flush=True)
    if options.only in {None, "greedy"}:
        _greedy(trial, sustained)
    if options.only in {None, "precisions"}:
        _precisions(trial, sustained, options.profile)


def _timed(name: str, trial: Trial) -> tuple[Report, float]:
    began = time.process_time()
    outcome = run_policy(name, trial)
    return outcome, time.process_time() - began


def _line(each: Report, oracle: Report, cpu_s: float) -> str:
    honest = "–" if each.honest_share is None else f"{each.honest_share:.3f} ({each.honest_asked})"
    covered = "–" if each.covered_share is None else f"{each.covered_share:.4f}"
    return (
        f"{each.policy:12} {each.goodput_s:9.3f} {each.good / max(1, oracle.good):9.3f} {each.good_share:6.3f} "
        f"{each.first_p95_s:8.2f} {each.between_p95_s:8.4f} {each.retracted_share:9.4%} "
        f"{each.engine_queued_share:8.3%} {each.jain:5.3f} {honest:>13} {covered:>7} {cpu_s:6.1f}"
    )


def _greedy(trial: Trial, sustained: float) -> None:
    """One tenant sends ten times its share. Everyone has the same share at first, at half the sustained load."""
    fair = replace(trial.load, factor=0.5 * sustained, tenants=10, skew=0.0)
    alone = play_ours(replace(trial, load=fair))
    beside = play_ours(replace(trial, load=replace(fair, greedy=9)))
    before = percentile(tenant_first_s(alone.requests, without="tenant-0"), 0.95)
    after = percentile(tenant_first_s(beside.requests, without="tenant-0"), 0.95)
    jain = report("ours", beside, trial.promise).jain
    print(f"\ngreedy tenant × 10: the others' p95 to the first token {before:.3f} s alone, {after:.3f} s beside it")
    print(f"  ratio {after / max(before, 1e-9):.2f}; Jain over tenants {jain:.3f}")


def _precisions(trial: Trial, sustained: float, name: str) -> None:
    if name not in FP8_OF:
        return
    for factor in (1.5, 2.0):
        bf16 = run_policy("ours", trial.at(factor * sustained))
        fp8 = run_policy("ours", replace(trial, profile=PROFILES[FP8_OF[name]]).at(factor * sustained))
        print(
            f"fp8 beside bf16 at × {factor}: goodput {fp8.goodput_s:.3f} and {bf16.goodput_s:.3f}/s, "
            f"{fp8.goodput_s / max(bf16.goodput_s, 1e-9) - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
