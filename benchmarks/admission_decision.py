"""What one admission decision costs: 64 replicas, 1,000 running requests fleet-wide.

    .venv/bin/python benchmarks/admission_decision.py [--replicas 64] [--running 1000]

The goal is 100 µs at the median, for a request that the emptiest replica takes. Beside it: one replica with all the
running requests, the worst case in which every replica is asked in vain, and the exact peak in plain Python.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

from gateway.forecast import EngineSpeed, peak_tokens
from gateway.gate import Entry, Gate, GateLimits, Need
from gateway.lengths import LengthDistribution, LengthKey, OutputLengths

ROUNDS = 300
TOTAL_TOKENS = 686_016


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--running", type=int, default=1000)
    options = parser.parse_args()
    draw = random.Random(1)
    lengths = _history(draw)
    fleet = [_gate(options.running // options.replicas, draw, lengths) for _ in range(options.replicas)]
    crowded = _gate(options.running, draw, lengths)
    small, huge = _need("new", 2000, lengths), _need("huge", TOTAL_TOKENS, lengths)
    running = [(draw.randint(500, 4000), draw.randint(1, 1000)) for _ in range(options.running)]
    _show(f"the emptiest of {options.replicas} replicas takes it", lambda: _first(fleet, small))
    _show(f"none of {options.replicas} replicas takes it", lambda: _first(fleet, huge))
    _show(f"one replica with {options.running} running", lambda: crowded.entry(small, 1.0))
    _show(f"the exact peak of {options.running} known lengths", lambda: peak_tokens(running))


def _first(fleet: list[Gate], need: Need) -> Gate | None:
    """In order of room, as routing asks; the order itself is part of the cost."""
    for gate in sorted(fleet, key=len):
        if gate.entry(need, 1.0) is Entry.NOW:
            return gate
    return None


def _show(what: str, decide: Callable[[], object]) -> None:
    times_us = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        decide()
        times_us.append((time.perf_counter_ns() - began) / 1000)
    times_us.sort()
    print(f"{what:50} p50 {statistics.median(times_us):8.1f} µs   p95 {times_us[int(ROUNDS * 0.95)]:8.1f} µs")


def _history(draw: random.Random) -> LengthDistribution:
    outputs, key = OutputLengths(), LengthKey("m", "t", "chat", 1)
    for _ in range(2000):
        outputs.observe(key, 1 + int(draw.expovariate(1 / 300)))
    return outputs.distribution(key, ceiling=4096)


def _need(name: str, prompt: int, lengths: LengthDistribution) -> Need:
    return Need(name, prompt, 0, prompt, 4096, lengths)


def _gate(running: int, draw: random.Random, lengths: LengthDistribution) -> Gate:
    limits = GateLimits(between_s_max=0.05, prefill_chunk_tokens=8192, running_max=4096, engine_clip_tokens=128)
    gate = Gate(TOTAL_TOKENS * 10, 64, limits, EngineSpeed(prefill_tokens_s=40_000, step_s=0.01))
    for number in range(running):
        gate.enter(_need(str(number), draw.randint(500, 4000), lengths))
        gate.progressed(str(number), 1, 0.0)
        gate.progressed(str(number), draw.randint(100, 400), 0.5)
    return gate


if __name__ == "__main__":
    main()
