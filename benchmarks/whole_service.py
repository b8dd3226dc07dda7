"""The whole service against its auditor, over many requests: `python -m benchmarks.whole_service [REQUESTS] [SEED]`.

Two processes of half as many, with other seeds, are as good: `tests/e2e/test_simulation.py` runs 100,000 so. Prints how
long it took, how requests ended, and every charge that is not the one that was foretold; there must be none.
"""

import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

import structlog

from api.serving import loop_factory, spare_the_collector
from tests.e2e.simulation import simulated_service

_REQUESTS = 100_000
_SHOWN_MAX = 20


async def _run(requests: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with simulated_service(Path(folder), seed=seed) as simulation:
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
            began = time.perf_counter()
            report = await simulation.run(requests, prepaid_nano=3_000 * requests, budget_nano=1_000 * requests)
            took_s = time.perf_counter() - began
    print(f"{requests:,} requests, seed {seed}: {took_s:.0f} s, {len(report.differences)} differences")
    print(", ".join(f"{count:,} {outcome}" for outcome, count in report.outcomes.most_common()))
    print(f"{report.cost_nano:,} nano-USD charged")
    for difference in report.differences[:_SHOWN_MAX]:
        print(difference)
    return len(report.differences)


def main() -> None:
    arguments = [int(argument) for argument in sys.argv[1:]]
    requests, seed = (arguments + [_REQUESTS, 1][len(arguments) :])[:2]
    spare_the_collector()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # as the service runs
        sys.exit(1 if runner.run(_run(requests, seed)) else 0)


if __name__ == "__main__":
    main()
