"""Real SGLang servers on this machine's CPU, started by the command line that a deployment file gives.

`make sglang` installs SGLang; a test that needs it and does not find it fails. Used by tests marked `sglang`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from backends.checkpoints import default_cache_dir
from backends.sglang.launch import EngineCommand, engine_commands
from backends.topology import Deployment, Model
from tests.engines import ROOT, free_port

# 45 to 120 s on an idle machine of two cores; imports are most of it.
READY_S_MAX = 400
# What a test with a server may take, the start included.
TEST_S_MAX = READY_S_MAX + 120
STOP_S_MAX = 10
# Without a GPU: another attention kernel, no warm-up that the first request doesn't do as well. Idle it must not spin.
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"),
    *("--skip-server-warmup", "--sleep-on-idle"),
)
# A dead prefill side is noticed after two missed beats.
PAIR_ENVIRONMENT = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# A request whose rid begins so has a page freed under it.
FAULTY_RID = "fault-"


@dataclass(frozen=True)
class SglangServer:
    """One running server. model: the deployment that it was launched from."""

    url: str
    model: Model
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """All its processes at once, as when a machine dies."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S_MAX)

    def signal(self, number: signal.Signals) -> None:
        """To all its processes, such as SIGSTOP, as when a machine hangs."""
        os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class SglangPair:
    """A running prefill/decode pair. model: the deployment that it was launched from."""

    model: Model
    prefill: SglangServer
    decode: SglangServer


def sglang_python() -> Path:
    """The interpreter of the environment that `make sglang` has made."""
    if sys.platform != "linux":
        pytest.skip("SGLang runs on Linux only")
    python = default_cache_dir(os.environ) / "sglang-venv" / "bin" / "python"  # noqa: TID251  tests stand where api/settings.py would
    assert (python.parent.parent / "installed").exists(), f"{python} is missing or half made: run `make sglang`"
    return python


def _model(checkpoint: Path, model_id: str, *, page_tokens: int, **served_by: Any) -> Model:
    """A deployment of the checkpoint on the CPU, with an FP8 KV cache."""
    fields: dict[str, Any] = {
        "id": model_id,
        "price": "none",
        "tokenizer": str(checkpoint),
        "limits": {"context_tokens": 2048, "output_tokens_max": 2048},
        "kv_cache_dtype": "fp8_e4m3",
        "page_tokens": page_tokens,
        "page_tags": True,
        **served_by,
    }
    return Deployment.model_validate({"models": [fields]}).models[0]


def _engine(checkpoint: Path, *flags: str, **environment: str) -> dict[str, Any]:
    return {
        "weights": {"checkpoint": str(checkpoint), "precision": "bf16"},
        "launch": {
            "python": str(sglang_python()),
            "port": free_port(),
            "total_tokens_max": 8192,
            "running_requests_max": 16,
            "extra": (*CPU_FLAGS, *flags),
            "environment": CPU_ENVIRONMENT | environment,
        },
    }


def _threads(count: int | None) -> dict[str, str]:
    """On the first cores; None: as SGLang likes."""
    if count is None:
        return {}
    cores = "0" if count == 1 else f"0-{count - 1}"
    return {"OMP_NUM_THREADS": str(count), "SGLANG_CPU_OMP_THREADS_BIND": cores}


@contextlib.contextmanager
def start_sglang(
    checkpoint: Path,
    *,
    model_id: str = "contract",
    page_tokens: int = 16,
    plain: bool = False,
    threads: int | None = None,
    launch: Mapping[str, Any] = MappingProxyType({}),
    context_tokens: int = 2048,
) -> Iterator[SglangServer]:
    """A server that is ready, with the page-tag plugin; all its processes end with the context.

    A plain one has neither page tags nor an FP8 cache: SGLang as it comes. launch: other values for keys of that table.
    """
    engine = _engine(checkpoint, **_threads(threads))
    engine["launch"] |= launch
    limits = {"context_tokens": context_tokens, "output_tokens_max": context_tokens}
    served_by: dict[str, Any] = {"replicas": [engine | {"name": "cpu"}], "limits": limits}
    if plain:
        served_by["kv_cache_dtype"] = "bf16"
    model = _model(checkpoint, model_id, page_tokens=page_tokens, page_tags=not plain, **served_by)
    [command] = engine_commands(model)
    with _started(command, model) as server:
        _wait_until_ready(server)
        yield server


@contextlib.contextmanager
def start_pair(checkpoint: Path, *, model_id: str = "contract") -> Iterator[SglangPair]:
    """Prefill and decode, both ready. Pages of 16 travel over Mooncake's TCP, on loopback."""
    libraries = sglang_python().parents[1] / "pair-libraries"
    assert libraries.is_dir(), f"{libraries} is missing: `make sglang` says why"
    environment = {"SGLANG_HOST_IP": "127.0.0.1", "LD_LIBRARY_PATH": str(libraries)} | PAIR_ENVIRONMENT
    # A request is the same to both halves, so what marks one for a fault is not.
    at_prefill = environment | {"PAGEGATE_PAGE_TAGS_FAULT": FAULTY_RID + "prefill-"}
    at_decode = environment | {"PAGEGATE_PAGE_TAGS_FAULT": FAULTY_RID + "decode-"}
    pair = {
        "name": "cpu",
        "transfer": "mooncake_tcp",
        "bootstrap_port": free_port(),
        "prefill": _engine(checkpoint, "--disable-overlap-schedule", **at_prefill),
        "decode": _engine(checkpoint, "--disaggregation-decode-retraction-backup", "cpu_tensor", **at_decode),
    }
    model = _model(checkpoint, model_id, page_tokens=16, pairs=[pair])
    prefill_command, decode_command = engine_commands(model)
    with _started(prefill_command, model) as prefill, _started(decode_command, model) as decode:
        for server in (prefill, decode):
            _wait_until_ready(server)
        yield SglangPair(model, prefill, decode)


@contextlib.contextmanager
def _started(command: EngineCommand, model: Model) -> Iterator[SglangServer]:
    """Started, not yet ready."""
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}  # noqa: TID251  as above
    urls = {name: engine.base_url for name, _, engine in model.engines()}
    with tempfile.TemporaryDirectory() as folder:
        plugins = _plugin_entry_points(Path(folder) / "plugins")
        variables = {"PYTHONPATH": f"{plugins}:{ROOT}", "PAGEGATE_PAGE_TAGS_FAULT": FAULTY_RID}
        log = Path(folder) / "sglang.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command.argv,
                env=inherited | variables | dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        server = SglangServer(urls[command.name], model, process, log)
        try:
            yield server
        finally:
            server.kill()


def _plugin_entry_points(folder: Path) -> Path:
    """What installing this project would leave in SGLang's environment for SGLang to find; and FP8 on the CPU."""
    info = folder / "pagegate_here-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pagegate-here\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\n"
        "pagegate-page-tags = backends.sglang.plugin:register\n"
        "cpu-fp8 = tests.sglang_cpu.cpu_fp8:register\n"
        "cpu-pair = tests.sglang_cpu.cpu_pair:register\n"
    )
    return folder


def _wait_until_ready(server: SglangServer) -> None:
    deadline = time.monotonic() + READY_S_MAX
    while not _is_ready(server.url):
        assert server.process.poll() is None, f"SGLang ended: {_tail(server.log)}"
        assert time.monotonic() < deadline, f"SGLang is not ready: {_tail(server.log)}"
        time.sleep(0.2)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        pass
    return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
