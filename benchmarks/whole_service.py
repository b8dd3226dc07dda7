"""The whole service against its auditor, over many requests: `python -m benchmarks.whole_service [REQUESTS] [SEED]`.

Prints how many requests a second went from hold over settlement and durable record into the database, how they ended,
and every charge that is not the one that was foretold; there must be none. `--processes 2` runs two services that share
nothing side by side, with half of the requests and a seed of its own each: `tests/e2e/test_simulation.py` runs
100,000 so.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import structlog

from api.serving import loop_factory, spare_the_collector
from api.settings import keep_tokenizers_single_threaded
from tests.e2e.simulation import Report, simulated_service

_SHOWN_MAX = 20


async def _run(requests: int, seed: int) -> Report:
    # Before the application is made, which binds its access log once: a line a request is not what is measured.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with tempfile.TemporaryDirectory() as folder:
        async with simulated_service(Path(folder), seed=seed) as simulation:
            return await simulation.run(requests, prepaid_nano=3_000 * requests, budget_nano=1_000 * requests)


def _simulated(requests: int, seed: int) -> Report:
    """What a service of its own came to, in a process of its own."""
    # As the service runs.
    spare_the_collector()
    keep_tokenizers_single_threaded()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(requests, seed))


def _told(reports: list[Report], seeds: range) -> Iterator[str]:
    # One clock for all processes of a machine; from the first request of any to the last record of any.
    took_s = max(report.ended_s for report in reports) - min(report.began_s for report in reports)
    requests = sum(report.requests for report in reports)
    charged = sum(report.charged for report in reports)
    differences = [difference for report in reports for difference in report.differences]
    yield f"{requests:,} requests, seeds {list(seeds)}: {len(differences)} differences"
    yield (
        f"{took_s:.1f} s until the last was in the database: {requests / took_s:,.0f} requests/s,"
        f" {charged / took_s:,.0f} of them charged"
    )
    outcomes = sum((report.outcomes for report in reports), Counter[str]())
    yield ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
    yield f"{sum(report.cost_nano for report in reports):,} nano-USD charged"
    yield from differences[:_SHOWN_MAX]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("requests", type=int, nargs="?", default=100_000, help="Of all processes together.")
    parser.add_argument("seed", type=int, nargs="?", default=1, help="Of the first process; each has the next one.")
    parser.add_argument("--processes", type=int, default=1, choices=range(1, 65), metavar="N")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.processes)
    whole, left = divmod(arguments.requests, arguments.processes)
    shares = [whole + (place < left) for place in range(arguments.processes)]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as processes:
        reports = list(processes.map(_simulated, shares, seeds))
    for line in _told(reports, seeds):
        print(line)
    sys.exit(1 if any(report.differences for report in reports) else 0)


if __name__ == "__main__":
    main()
