"""What one admission decision costs: 64 replicas, 1,000 running requests fleet-wide.

    .venv/bin/python -m benchmarks.admission_decision [--replicas 64] [--running 1000]

The goal is 100 µs at the median. The door's own placing is asked: expectation, order of replicas, and every limit of
each replica that is asked. Cases: the emptiest replica takes the request; none does, because its prompt fits nowhere,
or because its prompt fits everywhere and the forecast's peak nowhere, or because running streams could not spare the
time of its prefill; and with the replicas in four regions, of which home takes it or is full.
Beside them one replica with all running requests, and the exact peak in plain Python.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

from gateway.forecast import peak_tokens
from gateway.gate import EngineReport, GateLimits
from gateway.lengths import LengthKey, bucket_of
from gateway.placing import Placing, PlacingLimits
from gateway.want import Want

ROUNDS = 300
ROOMY = 686_016
CEILING = 4096
LIMITS = GateLimits(prefill_chunk_tokens=1 << 30, running_max=1 << 20, engine_clip_tokens=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--running", type=int, default=1000)
    options = parser.parse_args()
    replicas, running = options.replicas, options.running
    each = running // replicas
    roomy = _placing(replicas, each, tokens=ROOMY)
    crowded = _placing(1, running, tokens=10 * ROOMY)
    small = _want("new", 2000)
    # A pool that the running requests fill, but for their growth.
    tight = _placing(replicas, each, tokens=each * 3400)
    strict = _placing(replicas, each, tokens=ROOMY, between_s=0.0125)
    _show(f"the emptiest of {replicas} replicas takes it", lambda: _ask(roomy, small))
    _show("none: the prompt fits nowhere", lambda: _ask(tight, _want("huge", each * 3400)))
    _show("none: the prompt fits, the peak does not", lambda: _ask(tight, _want("new", 3000)))
    _show("none: it would stop streams for too long", lambda: _ask(strict, _want("long", 60_000, between_s=0.0125)))
    apart = _apart(_placing(replicas, each, tokens=ROOMY))
    _show("of four regions home takes it", lambda: _ask(apart, small))
    full = _apart(_placing(replicas, each, tokens=ROOMY), home_is_full=True)
    _show("of four regions home is full", lambda: _ask(full, small))
    _show(f"one replica with {running} running", lambda: _ask(crowded, small))
    known = [(draw.randint(500, 4000), draw.randint(1, 1000)) for draw in [random.Random(1)] for _ in range(running)]
    _show(f"the exact peak of {running} known lengths", lambda: peak_tokens(known))


def _ask(placing: Placing, want: Want) -> str | None:
    """Decide, and take nothing. Asked at a new moment each time, as in service."""
    placing.expect(want)
    site = placing.would_take(want, time.monotonic())
    return site.id if site is not None else None


def _show(what: str, decide: Callable[[], object]) -> None:
    times_us = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        decide()
        times_us.append((time.perf_counter_ns() - began) / 1000)
    times_us.sort()
    print(f"{what:50} p50 {statistics.median(times_us):8.1f} µs   p95 {times_us[int(ROUNDS * 0.95)]:8.1f} µs")


def _want(name: str, prompt: int, *, between_s: float = 1.0) -> Want:
    return Want(name, "t", "chat", prompt, 1, CEILING, between_s_max=between_s)


def _placing(replicas: int, running: int, *, tokens: int, between_s: float = 1.0) -> Placing:
    """Replicas in the midst of their work, with a learned history. Fewer run where the forecast refuses more."""
    draw, placing = random.Random(1), Placing(PlacingLimits())
    for _ in range(2000):
        length = 1 + int(draw.expovariate(1 / 300))
        placing.experience.lengths.observe(LengthKey("", "t", "chat", bucket_of(CEILING)), length)
    now = time.monotonic()
    for number in range(replicas):
        placing.join(f"engine-{number}", tokens, 64, LIMITS)
    for number in range(replicas * running):
        want = _want(str(number), draw.randint(500, 4000), between_s=between_s)
        if placing.place(want, now - 3.0, charged_s=1.0) is not None:
            placing.progressed(want.request_id, 1, now - 2.0)
            placing.progressed(want.request_id, draw.randint(100, 400), now)
    while tokens < ROOMY and placing.place(_want(f"more {draw.random()}", 2000), now, charged_s=1.0) is not None:
        pass
    for site in placing.sites.values():
        used = int(tokens - site.gate.free_tokens)
        for age in (0.4, 0.2, 0.0):
            placing.reported(site.id, EngineReport(used - draw.randint(0, 500), now - age), now - age)
    return placing


def _apart(placing: Placing, *, home_is_full: bool = False) -> Placing:
    """The same replicas by turns in four regions. home_is_full: by its engines' reports."""
    now = time.monotonic()
    for number, site in enumerate(placing.sites.values()):
        placing.locate(site.id, f"region-{number % 4}", 0.02 * (number % 4))
        if home_is_full and number % 4 == 0:
            placing.reported(site.id, EngineReport(site.gate.total_tokens - 100, now), now)
    return placing


if __name__ == "__main__":
    main()
