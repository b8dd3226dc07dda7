"""CPU a request and a streamed chunk costs in `pagegate serve`, beside a bare FastAPI + aiohttp pass-through.

    .venv/bin/python benchmarks/gateway_cost.py

Both servers run at once and are measured in turn, in several rounds; each figure is the median of its rounds, and the
ratio is taken within a round. Keys, prices, hold and durable record are on; the prompt has 50 tokens. The drain of the
durable record to SQL is kept out of the bursts (its interval is longer than a burst) and measured apart. CPU is user
and system time of the server's process tree, which a busy machine changes little. Servers are pinned to one core, the
engine and the load generator to another, where the system allows it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from api.settings import load_settings
from backends.checkpoints import DEFAULT_CHECKPOINT, checkpoint_path
from benchmarks.gateway_cost_load import Load, request_bytes, run_load

HERE = Path(__file__).parent
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
BASELINE_KEY = "sk-baseline"
DRAIN_INTERVAL_S = 10.0
START_S_MAX = 60.0
DRAIN_S_MAX = 60.0
BURST_ATTEMPTS = 3
IDLE_S = 3.0
# With the chat template around it this makes 50 tokens.
PROMPT = "Tell me in one short sentence which city is the capital of France and on which river it lies."

LOADS = {
    "request, not streamed": Load(requests=3_000, connections=16, chunks=None),
    "chunk, streams of 20": Load(requests=256, connections=32, chunks=20),
    "chunk, streams of 100": Load(requests=64, connections=32, chunks=100),
}


@dataclass
class Server:
    """A server under test: how to reach it and whose CPU time to read."""

    name: str
    port: int
    key: str
    process: psutil.Process
    results: dict[str, list[float]] = field(default_factory=dict)

    def cpu_s(self) -> float:
        """User and system time of the whole tree."""
        times = [process.cpu_times() for process in (self.process, *self.process.children(recursive=True))]
        return float(sum(taken.user + taken.system for taken in times))


@dataclass
class Drain:
    """Records written to SQL and the CPU it took, over all rounds; idle_share: CPU per second of an idle server."""

    records: int = 0
    cpu_s: float = 0.0
    idle_share: float = 0.0


class UsageRows:
    """How many usage records have reached SQL."""

    def __init__(self, home: Path) -> None:
        self._path = home / "pagegate.db"

    def count(self) -> int:
        with contextlib.closing(sqlite3.connect(self._path, timeout=10)) as connection:
            return int(connection.execute("SELECT count(*) FROM usage_events").fetchone()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval-ms", type=float, default=10, help="pause between two chunks of a stream")
    parser.add_argument("--checkpoint", type=Path, help="folder with the tokenizer; default: the fetched model's")
    options = parser.parse_args()
    checkpoint = options.checkpoint or checkpoint_path(DEFAULT_CHECKPOINT, load_settings().cache_dir)
    if not (checkpoint / "tokenizer.json").exists():
        sys.exit(
            f"There is no tokenizer in {checkpoint}: run `pagegate models pull` first, or name one (--checkpoint)."
        )
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with running_servers(home, checkpoint, options.interval_ms) as (baseline, gateway):
            asyncio.run(measure(baseline, gateway, UsageRows(home), options.rounds))


@contextlib.contextmanager
def running_servers(home: Path, checkpoint: Path, interval_ms: float) -> Iterator[tuple[Server, Server]]:
    server_core, other_core = two_cores()
    engine_port, baseline_port, gateway_port = (free_port() for _ in range(3))
    engine_url = f"http://127.0.0.1:{engine_port}"
    settings = gateway_settings(home, gateway_port, engine_url, checkpoint)
    engine = [sys.executable, HERE / "gateway_cost_engine.py", "--port", engine_port, "--interval-ms", interval_ms]
    baseline = [sys.executable, HERE / "gateway_cost_baseline.py", "--port", baseline_port]
    baseline += ["--engine", engine_url, "--key", BASELINE_KEY]
    gateway = ["env", *(f"{name}={value}" for name, value in settings.items()), sys.executable, "-m", "api"]
    pin(os.getpid(), other_core)
    with contextlib.ExitStack() as stack:
        stack.enter_context(child(engine, other_core))
        await_up(engine_port, "/health")
        baseline_process = stack.enter_context(child(baseline, server_core))
        gateway_process = stack.enter_context(child(gateway, server_core))
        await_up(baseline_port, "/openapi.json")
        await_up(gateway_port, "/health/ready")
        key = json.loads((home / "bootstrap.json").read_text())["api_key"]
        yield (
            Server("baseline", baseline_port, BASELINE_KEY, baseline_process),
            Server("pagegate", gateway_port, key, gateway_process),
        )


def gateway_settings(home: Path, port: int, engine_url: str, checkpoint: Path) -> dict[str, object]:
    """Variables of a gateway that is measured."""
    return {
        "PAGEGATE_HOME": home,
        "PAGEGATE_PORT": port,
        "PAGEGATE_MODEL_ID": MODEL,
        "PAGEGATE_ENGINE__URL": engine_url,
        "PAGEGATE_ENGINE__CHECKPOINT": checkpoint,
        "PAGEGATE_BILLING__DRAIN_INTERVAL_S": DRAIN_INTERVAL_S,
        "PAGEGATE_LOG_FORMAT": "json",
    }


async def measure(baseline: Server, gateway: Server, rows: UsageRows, rounds: int) -> None:
    drain = Drain()
    for server in (baseline, gateway):  # warm caches, connections and code
        await burst(server, Load(requests=500, connections=16, chunks=None))
        await burst(server, Load(requests=32, connections=32, chunks=20))
    await drained(gateway, rows, expected := 532, drain=None)
    drain.idle_share = await idle_share(gateway)
    for number in range(1, rounds + 1):
        for name, load in LOADS.items():
            figures = f"round {number}, {name}:"
            for server in (baseline, gateway) if number % 2 else (gateway, baseline):
                if server is gateway:
                    cost_s, expected = await undisturbed_burst(gateway, load, rows, expected, drain)
                else:
                    cost_s = await burst(baseline, load)
                microseconds = cost_s / (load.requests * (load.chunks or 1)) * 1e6
                server.results.setdefault(name, []).append(microseconds)
                figures += f"  {server.name} {microseconds:.0f} us"
            print(figures, flush=True)
    report(baseline, gateway, drain)


async def burst(server: Server, load: Load) -> float:
    """CPU seconds that the server took for a load."""
    before = server.cpu_s()
    await chat(server.port, server.key, load)
    return server.cpu_s() - before


async def chat(port: int, key: str, load: Load) -> None:
    """A load of chats, streamed where it counts chunks."""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": load.chunks or 16}
    if load.chunks:
        fields["stream"] = True
    await run_load(port, request_bytes(port, key, json.dumps(fields).encode()), load)


async def undisturbed_burst(
    gateway: Server, load: Load, rows: UsageRows, expected: int, drain: Drain
) -> tuple[float, int]:
    """A burst into which no drain fell, and how many rows there are to be; the drain that follows is added up."""
    for _ in range(BURST_ATTEMPTS):
        cost_s = await burst(gateway, load)
        undisturbed = rows.count() == expected
        expected += load.requests
        await drained(gateway, rows, expected, drain=drain if undisturbed else None)
        if undisturbed:
            return cost_s, expected
    sys.exit("A drain fell into every burst: the machine is too busy to tell the two apart.")


async def drained(gateway: Server, rows: UsageRows, expected: int, *, drain: Drain | None) -> None:
    """Waits until all records are in SQL; adds what that cost to `drain`."""
    began, cpu_before, rows_before = time.monotonic(), gateway.cpu_s(), rows.count()
    while rows.count() < expected:
        if time.monotonic() - began > DRAIN_S_MAX:
            sys.exit(f"Only {rows.count()} of {expected} records reached SQL in {DRAIN_S_MAX:.0f} s.")
        await asyncio.sleep(0.1)
    if drain is not None:
        drain.records += expected - rows_before
        drain.cpu_s += gateway.cpu_s() - cpu_before - drain.idle_share * (time.monotonic() - began)


async def idle_share(gateway: Server) -> float:
    before = gateway.cpu_s()
    await asyncio.sleep(IDLE_S)
    return (gateway.cpu_s() - before) / IDLE_S


def report(baseline: Server, gateway: Server, drain: Drain) -> None:
    print()
    print(f"{'CPU a':<24}{'pass-through':>14}{'pagegate':>12}{'ratio':>8}  ratios of the rounds")
    for name in LOADS:
        bare, ours = baseline.results[name], gateway.results[name]
        ratios = [mine / other for mine, other in zip(ours, bare, strict=True)]
        print(
            f"{name:<24}{statistics.median(bare):>11.0f} us{statistics.median(ours):>9.0f} us"
            f"{statistics.median(ratios):>8.2f}  {' '.join(f'{ratio:.2f}' for ratio in ratios)}",
        )
    print(
        f"{'record drained to SQL':<24}{'':>14}{drain.cpu_s / drain.records * 1e6:>9.0f} us  ({drain.records} records)"
    )
    print(f"{'idle':<24}{'':>14}{drain.idle_share * 100:>9.1f} %  of one core, taken off the drain's figure")


@contextlib.contextmanager
def child(command: Sequence[object], core: int | None) -> Iterator[psutil.Process]:
    """A process of our own, ended with its tree when the block ends."""
    root = HERE.parent
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(word) for word in command], cwd=root, stdout=log, stderr=subprocess.STDOUT)
        try:
            if core is not None:
                pin(process.pid, core)
            yield psutil.Process(process.pid)
        except BaseException:
            log.seek(0)
            print(log.read()[-2_000:].decode(errors="replace"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def await_up(port: int, path: str) -> None:
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"Nothing answered on port {port} within {START_S_MAX:.0f} s.")
        time.sleep(0.1)


def two_cores() -> tuple[int | None, int | None]:
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


def pin(pid: int, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(pid, {core})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
