"""What a change to the gateway saves: this checkout's `pagegate serve` beside another's and the bare pass-through.

    .venv/bin/python -m benchmarks.gateway_cost_against TREE [--rounds 25] [--chunks 100]

All three serve at once, and short bursts go to each in turn, in an order drawn anew for each round, so that whatever
else the machine does meets all alike. The ratio is taken within each round; its median and quartiles are printed, and
that of the least figures, which others disturbed least. CPU is what Linux's scheduler counted for the process's
threads, to the nanosecond. TREE: a checkout with a .venv of its own, or a link to this one's.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from api.settings import load_settings
from backends.checkpoints import DEFAULT_CHECKPOINT, checkpoint_path
from benchmarks.gateway_cost import BASELINE_KEY, HERE, await_up, chat, child, free_port, gateway_settings
from benchmarks.gateway_cost_load import Load

WARM = {None: 300, 20: 64, 100: 32}
BURST = {None: 300, 20: 96, 100: 32}
CONNECTIONS = {None: 16, 20: 32, 100: 32}


@dataclass
class Served:
    """One of the three. figures: microseconds of CPU a request or a chunk, by round."""

    name: str
    port: int
    key: str
    pid: int
    figures: list[float] = field(default_factory=list)

    def cpu_ns(self) -> int:
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--chunks", type=int, choices=[20, 100], help="of each stream; without it answers are whole")
    options = parser.parse_args()
    if not Path("/proc/self/schedstat").exists():
        sys.exit("This needs Linux: its scheduler counts CPU time in nanoseconds.")
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(three_served(options.tree.resolve()))
        asyncio.run(measure(served, options.chunks, options.rounds))
        report(served)


@contextlib.contextmanager
def three_served(tree: Path) -> Iterator[list[Served]]:
    """TREE's gateway, this one's, and the pass-through, in front of one engine."""
    engine_port = free_port()
    engine_url = f"http://127.0.0.1:{engine_port}"
    with contextlib.ExitStack() as stack:
        engine = [sys.executable, HERE / "gateway_cost_engine.py", "--port", engine_port]
        stack.enter_context(child(engine, None))
        await_up(engine_port, "/health")
        served = []
        for name, root in (("the other checkout", tree), ("this one", HERE.parent)):
            home, port = Path(stack.enter_context(tempfile.TemporaryDirectory())), free_port()
            process = stack.enter_context(child(gateway(root, home, port, engine_url), None))
            await_up(port, "/health/ready")
            key = json.loads((home / "bootstrap.json").read_text())["api_key"]
            served.append(Served(name, port, key, process.pid))
        port = free_port()
        bare = [sys.executable, HERE / "gateway_cost_baseline.py", "--port", port]
        process = stack.enter_context(child([*bare, "--engine", engine_url, "--key", BASELINE_KEY], None))
        await_up(port, "/openapi.json")
        yield [*served, Served("pass-through", port, BASELINE_KEY, process.pid)]


def gateway(root: Path, home: Path, port: int, engine_url: str) -> list[object]:
    checkpoint = checkpoint_path(DEFAULT_CHECKPOINT, load_settings().cache_dir)
    settings = {"PYTHONPATH": root} | gateway_settings(home, port, engine_url, checkpoint)
    python = root / ".venv" / "bin" / "python"
    return ["env", "-C", root, *(f"{name}={value}" for name, value in settings.items()), python, "-m", "api"]


async def measure(served: list[Served], chunks: int | None, rounds: int) -> None:
    draw = random.Random(1)
    for each in served:
        await burst_us(each, Load(WARM[chunks], CONNECTIONS[chunks], chunks))
    for _ in range(rounds):
        for each in draw.sample(served, len(served)):
            each.figures.append(await burst_us(each, Load(BURST[chunks], CONNECTIONS[chunks], chunks)))


async def burst_us(served: Served, load: Load) -> float:
    before = served.cpu_ns()
    await chat(served.port, served.key, load)
    return (served.cpu_ns() - before) / (load.requests * (load.chunks or 1)) / 1000


def report(served: list[Served]) -> None:
    other, this, bare = served
    for each in served:
        print(f"{each.name:<20} median {statistics.median(each.figures):7.1f} us   least {min(each.figures):7.1f} us")
    for name, above, below in (
        ("this one / the other", this, other),
        ("the other / pass-through", other, bare),
        ("this one / pass-through", this, bare),
    ):
        ratios = [mine / theirs for mine, theirs in zip(above.figures, below.figures, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        least = min(above.figures) / min(below.figures)
        print(f"{name:<26} {middle:.2f} (quartiles {low:.2f} ... {high:.2f}), of the least {least:.2f}")


if __name__ == "__main__":
    main()
