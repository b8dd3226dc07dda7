"""How cost and quality of decisions grow with a fleet: many replicas in regions, many gateways with delayed reports.

    .venv/bin/python -m benchmarks.admission_fleet TRACE [--replicas 1,10,100,1000] [--delay-s 0.2] [--load 0.9]
        [--decisions 10000] [--profile h200-8b-bf16] [--gateways N] [--claim-ms 1] [--seed 1]

The fleets are those of gateway/replay/profiles.py, up to 1,000 replicas in 4 regions before 64 gateways; fleets.py
beside it says what is played. Printed: CPU time of a decision; over-full, the part of admissions after which a
replica held more than its pool; what was retracted for it; refusals, and those among them although some replica of the
region had room; and what ended well against an oracle. Each fleet twice: by reports alone, and with a board of claims a
region. `--gateways` as many as regions is the same without rivals.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from gateway.replay.fleets import run_fleet
from gateway.replay.profiles import FLEETS, PROFILES
from gateway.replay.traces import read_trace


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--replicas", default="1,10,100,1000")
    parser.add_argument("--gateways", type=int)
    parser.add_argument("--delay-s", type=float, default=0.2)
    parser.add_argument("--claim-ms", type=float, default=1.0, help="a claim's way to the board and back")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--decisions", type=int, default=10_000)
    parser.add_argument("--profile", default="h200-8b-bf16", choices=sorted(PROFILES))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = read_trace(options.trace)
    print(f"{options.trace.name} on {options.profile}, load {options.load}, reports {options.delay_s} s late")
    print(
        f"{'replicas':>8} {'regions':>7} {'gateways':>8} {'board':>5} {'p50 µs':>7} {'p99 µs':>7} "
        f"{'over-full':>9} {'retracted':>9} {'refused':>8} {'blind':>6} {'of oracle':>9} {'fullest':>7} "
        f"{'waited ms p99':>13} {'cpu s':>6} {'requests/min':>12}"
    )
    for count in map(int, options.replicas.split(",")):
        fleet = replace(FLEETS[count], delay_s=options.delay_s, load=options.load, decisions=options.decisions)
        if options.gateways:
            fleet = replace(fleet, gateways=max(fleet.regions, options.gateways))
        for claim_s in (None, options.claim_ms / 1000):
            began = time.process_time()
            fleet = replace(fleet, claim_s=claim_s)
            each = run_fleet(rows, fleet, PROFILES[options.profile], seed=options.seed, clock_ns=time.thread_time_ns)
            took_s = time.process_time() - began
            print(
                f"{each.replicas:8} {each.regions:7} {each.gateways:8} {'yes' if each.shared else 'no':>5} "
                f"{each.decision_us_p50:7.0f} {each.decision_us_p99:7.0f} {each.over_full:9.3%} {each.retracted:9.3%} "
                f"{each.refused:8.2%} {each.blind:6.1%} {each.good_of_oracle:9.3f} {each.used_most:7.1%} "
                f"{each.waited_ms_p99:13.0f} {took_s:6.1f} {60 * each.played / took_s:12.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
