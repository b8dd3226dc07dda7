"""Engine-hours and promises kept over loads of many kinds, by what decides how many engines there are.

    .venv/bin/python -m benchmarks.scaling_loads [--azure TRACE] [--mooncake TRACE] [--only day,burst,ramp,square]
        [--policies demand,thresholds,half,fixed] [--seeds 1,2,3] [--most 8]

The traces over an hour as a day, from a tenth of noon's load to noon and back, on whole H200s (`h200-8b-bf16`);
synthetic requests of random sizes over 40 minutes as a day, a burst of four minutes, a ramp and a square wave, on pools
of 20,000 tokens, where few requests fill an engine. One to --most engines that take about a minute to start. Printed
are means over the seeds, each of which draws requests, tenants and starts. Limits: 5 s to the first token and 50 ms
between tokens, for Mooncake's conversations 30 s and 100 ms.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gateway.replay.day_trials import DAY_POLICIES, DayTrial, run_day
from gateway.replay.days import Day, Shape
from gateway.replay.doors import Promise
from gateway.replay.growing import Starts
from gateway.replay.profiles import PROFILES
from gateway.replay.traces import Load, TraceRow, read_trace
from tests.gateway.replay.synthetic import synthetic_rows

_WHOLE = PROFILES["h200-8b-bf16"]
_SMALL = replace(_WHOLE, total_tokens=20_000)
# What one engine sustains: of each trace's own rate (benchmarks.admission_replay finds it), and requests a second.
_AZURE_EACH, _MOONCAKE_EACH, _SYNTHETIC_EACH = 0.4, 0.25, 1.25


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--only", help="Of azure, mooncake, day, burst, ramp, square.")
    parser.add_argument("--policies", default="demand,thresholds,half,fixed", help=", ".join(DAY_POLICIES))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--most", type=int, default=8)
    options = parser.parse_args()
    loads = _loads(options.azure, options.mooncake, options.most)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    print(f"{'load':9} {'policy':11} {'requests':>8} {'kept':>8} {'hours':>6} {'changes':>7} {'p99 s':>6} {'cpu s':>6}")
    for name in options.only.split(",") if options.only else loads:
        for policy in options.policies.split(","):
            began = time.process_time()
            days = [run_day(policy, loads[name](seed)) for seed in seeds]
            print(
                f"{name:9} {policy:11} {sum(day.requests for day in days):8} "
                f"{statistics.mean(day.good_share for day in days):8.2%} "
                f"{statistics.mean(day.unit_hours for day in days):6.2f} "
                f"{statistics.mean(day.changes for day in days):7.1f} "
                f"{statistics.mean(day.first_p99_s for day in days):6.1f} {time.process_time() - began:6.1f}",
                flush=True,
            )


def _loads(azure: Path | None, mooncake: Path | None, most: int) -> dict[str, Callable[[int], DayTrial]]:
    loads: dict[str, Callable[[int], DayTrial]] = {}
    if azure is not None:
        loads["azure"] = lambda seed: _of_trace(read_trace(azure), _AZURE_EACH, Promise(5.0, 0.05), most, seed)
    if mooncake is not None:
        loads["mooncake"] = lambda seed: _of_trace(read_trace(mooncake), _MOONCAKE_EACH, Promise(30.0, 0.1), most, seed)
    for shape in Shape:
        loads[shape.value] = lambda seed, shape=shape: _synthetic(shape, most, seed)  # type: ignore[misc]  # its value
    return loads


def _of_trace(rows: list[TraceRow], each: float, promise: Promise, most: int, seed: int) -> DayTrial:
    load = Load(factor=each * most, seed=seed, returning=0.0)
    return DayTrial(rows, load, _WHOLE, promise, most, Day(length_s=3600.0), Starts(seed=seed))


def _synthetic(shape: Shape, most: int, seed: int) -> DayTrial:
    rows = synthetic_rows(3000, rate=1.0, seed=seed)
    load = Load(factor=_SYNTHETIC_EACH * most, tenants=6, seed=seed, returning=0.0)
    return DayTrial(rows, load, _SMALL, Promise(5.0, 0.05), most, Day(2400.0, shape=shape), Starts(seed=seed))


if __name__ == "__main__":
    main()
