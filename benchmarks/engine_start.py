"""How long an engine takes to start, part by part: cold and warm, and from the sleep in which it keeps its process.

    python -m benchmarks.engine_start [--rounds 5] [--against TREE] [--cold] [--sglang]

Prints medians over rounds. The local engine serves the default model; a start is measured from outside (until /ready
answers, until a first token has come, and the processor time that both took) and told by the engine itself, part by
part. --against: another checkout of this project, whose engine is started in turn with this one's, so that both meet
the same neighbours on the machine. --cold: the checkpoint is put out of the page cache before each start; what other
processes have mapped, such as torch, stays there. --sglang: SGLang on this CPU beside it (`make sglang`), by its log.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from backends.checkpoints import default_cache_dir
from tests.engines import ROOT, free_port, real_model_path
from tests.sglang_cpu.server import start_sglang

READY_S_MAX = 300.0
PARTS = ("process", "imports", "kernels", "weights", "pool", "warm_up", "total")
# What SGLang's log says when a part has ended.
SGLANG_MARKS = {
    "process, imports": "Load weight begin",
    "weights": "Load weight end",
    "pool": "max_total_num_tokens=",
    "first answer": "The server is fired up",
}


@dataclass(slots=True)
class Start:
    """Seconds, of one start. cpu: processor seconds of the process until its first token."""

    ready: float
    first_token: float
    cpu: float
    parts: Mapping[str, float] = field(default_factory=dict)
    resumed: Mapping[str, float] = field(default_factory=dict)
    resident_mib: Mapping[str, float] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--sglang", action="store_true")
    options = parser.parse_args()
    trees = {"this": ROOT} | ({} if options.against is None else {"against": options.against.resolve()})
    starts: dict[str, list[Start]] = {name: [] for name in trees}
    for number in range(options.rounds):
        for name, tree in trees.items() if number % 2 else reversed(trees.items()):
            if options.cold:
                _evict(real_model_path())
            starts[name].append(_start(tree))
            print(f"round {number} {name}: {_line(starts[name][-1])}", flush=True)
    for name, found in starts.items():
        _print(name, found)
    if options.sglang:
        _sglang()


def _start(tree: Path) -> Start:
    """One engine of this checkout: started, asked for a token, and if it can be, put to sleep and woken."""
    with _engine(tree) as (process, url, began):
        while not _answers(url + "/ready"):
            assert process.poll() is None, "the engine ended"
            assert time.monotonic() - began < READY_S_MAX, "the engine is not ready"
            time.sleep(0.005)
        ready = time.monotonic() - began
        _ask(url)
        first_token = time.monotonic() - began
        known = psutil.Process(process.pid)
        spent = known.cpu_times()
        start = Start(ready, first_token, spent.user + spent.system, _parts(url))
        if start.parts:
            start.resumed, start.resident_mib = _sleep(url, known)
        return start


def _sleep(url: str, process: psutil.Process) -> tuple[Mapping[str, float], Mapping[str, float]]:
    awake = process.memory_info().rss
    released_at = time.monotonic()
    _post(url + "/release_memory_occupation", {})
    asleep = process.memory_info().rss
    resumed_at = time.monotonic()
    _post(url + "/resume_memory_occupation", {})
    ready_at = time.monotonic()
    _ask(url)
    seconds = {
        "release": resumed_at - released_at,
        "resume": ready_at - resumed_at,
        "first token": time.monotonic() - resumed_at,
    }
    return {**seconds, **_parts(url)}, {"awake": awake / 2**20, "asleep": asleep / 2**20}


@contextlib.contextmanager
def _engine(tree: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, float]]:
    kernels = default_cache_dir(os.environ) / "kernels"  # noqa: TID251  benchmarks stand where api/settings.py would
    port = free_port()
    argv = [
        *(sys.executable, "-m", "backends.local.server", "--model-path", str(real_model_path())),
        *("--port", str(port), "--kernel-cache", str(kernels), "--exit-with-parent"),
    ]
    environment = os.environ | {"PYTHONPATH": str(tree)}  # noqa: TID251  as above
    began = time.monotonic()
    process = subprocess.Popen(argv, cwd=tree, env=environment, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{port}", began
    finally:
        process.kill()
        process.wait()


def _evict(folder: Path) -> None:
    """Out of the page cache, as far as nobody has it mapped."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _post(url: str, body: Mapping[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=READY_S_MAX) as response:
        response.read()


def _ask(url: str) -> None:
    _post(url + "/v1/completions", {"prompt": [1, 50, 60], "max_tokens": 1, "temperature": 0})


def _parts(url: str) -> Mapping[str, float]:
    with urllib.request.urlopen(url + "/server_info", timeout=5) as response:
        parts: Mapping[str, float] = json.loads(response.read()).get("start_seconds", {})
        return parts


def _line(start: Start) -> str:
    return (
        f"ready {start.ready:.2f} s, first token {start.first_token:.2f} s, processor {start.cpu:.2f} s"
        f"; resumed in {start.resumed.get('resume', 0):.2f} s"
    )


def _print(name: str, starts: list[Start]) -> None:
    print(f"\n{name}: medians of {len(starts)} starts, seconds")
    print(f"  ready        {median(one.ready for one in starts):6.2f}")
    print(f"  first token  {median(one.first_token for one in starts):6.2f}")
    print(f"  processor    {median(one.cpu for one in starts):6.2f}")
    for part in PARTS:
        if values := [one.parts[part] for one in starts if part in one.parts]:
            print(f"    {part:<10} {median(values):6.2f}")
    resumed = [one.resumed for one in starts if one.resumed]
    for part in resumed[0] if resumed else ():
        print(f"  asleep: {part:<12} {median(one[part] for one in resumed):6.2f}")
    for state in ("awake", "asleep"):
        if values := [one.resident_mib[state] for one in starts if state in one.resident_mib]:
            print(f"  resident {state:<7} {median(values):6.0f} MiB")


def _sglang() -> None:
    began = time.time()
    with start_sglang(real_model_path(), plain=True, threads=None, context_tokens=2048) as server:
        ready = time.time() - began
        _post(server.url + "/v1/completions", {"model": "contract", "prompt": [1, 50, 60], "max_tokens": 1})
        print(f"\nSGLang: ready {ready:.1f} s, first token {time.time() - began:.1f} s; by its log (whole seconds)")
        log = server.log.read_text(errors="replace")
    last = began
    for part, mark in SGLANG_MARKS.items():
        if (found := re.search(rf"\[(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\][^\n]*{re.escape(mark)}", log)) is None:
            print(f"  {part:<18} not in its log")
            continue
        at = datetime.fromisoformat(found.group(1)).astimezone().timestamp()
        print(f"  {part:<18} {at - last:6.1f}")
        last = at


if __name__ == "__main__":
    main()
