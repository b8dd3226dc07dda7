"""SGLang servers for one run, on GPUs or (to rehearse) on the CPU: started side by side, stopped with the run.

`python3 -m sglang.launch_server` must work in the environment that this runs in, with this repository on PYTHONPATH.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.h200.shapes import write_shape

_STOP_S = 10
# Sizes of CUDA graphs; the same for all, so that memory is the same for all.
_GRAPHS = [str(size) for size in (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16))]
# Of a GPU's memory, for weights and KV together: what the earlier measurements of this shape had.
_MEMORY = "0.235"


@dataclass(frozen=True)
class Place:
    """Where servers run. shapes: the checkpoints' folder. logs: where their output goes. cpu: a rehearsal."""

    shapes: Path
    logs: Path
    cpu: bool = False

    def flags(self, *, page_tokens: int) -> list[str]:
        common = ["--host", "127.0.0.1", "--load-format", "dummy", "--enable-metrics", "--enable-cache-report"]
        common += ["--page-size", str(page_tokens), "--sampling-backend", "pytorch", "--grammar-backend", "none"]
        if self.cpu:
            return [
                *common,
                *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"),
                *("--max-total-tokens", "16384", "--max-running-requests", "32", "--skip-server-warmup"),
            ]
        return [
            *common,
            *("--kv-cache-dtype", "fp8_e4m3", "--attention-backend", "fa3", "--mm-feature-transport", "cpu"),
            *("--mem-fraction-static", _MEMORY, "--disable-prefill-cuda-graph", "--disable-flashinfer-autotune"),
            *("--cuda-graph-bs-decode", *_GRAPHS),
        ]

    def weights(self, precision: str) -> list[str]:
        """precision: fp8 or int4. A rehearsal has bf16 whatever is asked for."""
        if self.cpu:
            return ["--model-path", str(write_shape("tiny", self.shapes))]
        if precision == "int4":
            return ["--model-path", str(write_shape("8b-int4", self.shapes))]
        return ["--model-path", str(write_shape("8b", self.shapes)), "--quantization", "fp8"]

    @property
    def vocabulary(self) -> int:
        return 4096 if self.cpu else 128_000


@dataclass(frozen=True)
class Spec:
    """One server. gpu: which it runs on."""

    name: str
    gpu: int
    port: int
    flags: Sequence[str]
    tags: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running(place: Place, specs: Sequence[Spec], *, ready_s_max: float) -> Iterator[None]:
    """All of them, ready; raises with the end of its log if one is not in time."""
    with contextlib.ExitStack() as started:
        processes = [(spec, started.enter_context(_process(place, spec))) for spec in specs]
        deadline = time.monotonic() + ready_s_max
        for spec, process in processes:
            _wait_until_ready(place, spec, process, deadline)
        yield


@contextlib.contextmanager
def _process(place: Place, spec: Spec) -> Iterator[subprocess.Popen[bytes]]:
    environment = dict(os.environ) | dict(spec.environment)  # noqa: TID251 - a benchmark's own process
    environment["PAGEGATE_PAGE_TAGS"] = "1" if spec.tags else "0"
    argv = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--port", str(spec.port), *spec.flags]
    if not place.cpu and spec.gpu:
        # Not by CUDA_VISIBLE_DEVICES: the halves of a pair reach into each other's memory, so both must see both.
        argv += ["--base-gpu-id", str(spec.gpu)]
    with (place.logs / f"{spec.name}.log").open("wb") as log:
        process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for by in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, by)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)


def _wait_until_ready(place: Place, spec: Spec, process: subprocess.Popen[bytes], deadline: float) -> None:
    path = place.logs / f"{spec.name}.log"
    while b"fired up" not in path.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{spec.name} is not ready:\n{path.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def metric(spec: Spec, name: str) -> float:
    """The sum of a metric over the server's processes; 0 if it is not there."""
    with urllib.request.urlopen(f"{spec.url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


def flush(spec: Spec) -> None:
    """Empty the prefix cache."""
    request = urllib.request.Request(f"{spec.url}/flush_cache", method="POST")
    urllib.request.urlopen(request, timeout=20).close()
