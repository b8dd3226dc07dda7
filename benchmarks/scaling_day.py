"""A day's curve over a trace, before a fleet that grows and shrinks: engine-hours and promises kept, by policy.

    .venv/bin/python -m benchmarks.scaling_day TRACE [--profile h200-8b-bf16] [--each 0.4] [--most 8]
        [--day-s 7200] [--night 0.1] [--start-s 60] [--first-s 5] [--between-ms 50] [--seed 1]

--each: the load factor of the trace that one engine sustains (benchmarks.admission_replay finds it); noon is --noon
times what --most engines sustain. The service's scaling beside all engines always, half of them, and thresholds.
Deterministic by --seed.
"""

import argparse
import time
from pathlib import Path

from gateway.replay.day_trials import DAY_POLICIES, DayTrial, day_report, play_day
from gateway.replay.days import Day
from gateway.replay.doors import Promise
from gateway.replay.growing import Starts
from gateway.replay.profiles import PROFILES
from gateway.replay.traces import Load, read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--profile", default="h200-8b-bf16", choices=sorted(PROFILES))
    parser.add_argument("--each", type=float, default=0.4)
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--noon", type=float, default=0.8, help="Of what --most engines sustain.")
    parser.add_argument("--day-s", type=float, default=7200.0)
    parser.add_argument("--night", type=float, default=0.1)
    parser.add_argument("--start-s", type=float, default=60.0)
    parser.add_argument("--first-s", type=float, default=5.0)
    parser.add_argument("--between-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=DAY_POLICIES)
    parser.add_argument("--changes", action="store_true", help="Print each change and its reason.")
    options = parser.parse_args()
    trial = DayTrial(
        read_trace(options.trace),
        Load(factor=options.noon * options.each * options.most, seed=options.seed, returning=0.0),
        PROFILES[options.profile],
        Promise(options.first_s, options.between_ms / 1000),
        options.most,
        Day(length_s=options.day_s, night_share=options.night),
        Starts(seconds=options.start_s, seed=options.seed),
    )
    print(
        f"{options.trace.name} on 1 to {options.most} × {options.profile}, noon at {options.noon:.2f} of their load, "
        f"starts of {options.start_s:.0f} s, seed {options.seed}"
    )
    print(
        f"{'policy':11} {'requests':>8} {'kept':>8} {'hours':>7} {'largest':>7} {'changes':>7} {'turns':>5} "
        f"{'ttft p50':>8} {'p99':>6} {'tbt p95':>8} {'cpu s':>6}"
    )
    for name in [options.only] if options.only else DAY_POLICIES:
        began = time.process_time()
        grown = play_day(name, trial)
        each = day_report(name, grown, trial.promise)
        print(
            f"{each.policy:11} {each.requests:8} {each.good_share:8.3%} {each.unit_hours:7.2f} {each.largest:7} "
            f"{each.changes:7} {each.turns:5} {each.first_p50_s:8.2f} {each.first_p99_s:6.2f} "
            f"{each.between_p95_s:8.4f} {time.process_time() - began:6.1f}",
            flush=True,
        )
        for at, number, why in grown.wished if options.changes else ():
            print(f"  {at:7.0f} s  {number:3}  {why}")


if __name__ == "__main__":
    main()
