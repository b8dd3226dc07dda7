"""Real SGLang servers on this machine's CPU, started by the command line that a deployment file gives.

`make sglang` installs SGLang; a test that needs it and does not find it fails. Used by tests marked `sglang`. However a
test ends, a killed one included, its servers end with it: a guard beside each holds our end of a pipe.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

from api.settings import Settings
from backends.checkpoints import default_cache_dir
from backends.sglang.launch import EngineCommand, engine_commands
from backends.topology import Deployment, Model
from tests.e2e.service import price_deployed
from tests.engines import ROOT, free_port, wait_until_ready
from tests.migrated import copy_migrated

# 45 to 120 s on an idle machine of two cores; imports are most of it.
READY_S_MAX = 400
# What a test with a server may take, the start included.
TEST_S_MAX = READY_S_MAX + 120
STOP_S_MAX = 15
# Ends with its child, and when its standard input closes ends its child: gently first, then all of its group.
GUARD = (
    'exec 3<&0; "$@" </dev/null 3<&- & child=$!; cat <&3 >/dev/null & wait -n; kill -TERM $child 2>/dev/null;'
    " (sleep 8; kill -KILL 0) & wait $child; kill -KILL 0"
)
PAGEGATE = "import sys; from api.cli.main import run; run(sys.argv[1:])"
# What the grammar back end may not do: fill an answer with blanks.
FORM_FLAGS = ("--tool-call-parser", "hermes", "--constrained-json-disable-any-whitespace")
# Without a GPU: another attention kernel, no warm-up that the first request doesn't do as well. Idle it must not spin.
CPU_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--skip-server-warmup", "--sleep-on-idle")
# A dead prefill side is noticed after two missed beats.
PAIR_ENVIRONMENT = {"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2"}
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.sglang_cpu.models",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
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
        _kill(self.process)

    def signal(self, number: signal.Signals) -> None:
        """To all its processes, such as SIGSTOP, as when a machine hangs."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        self.kill()


@dataclass(frozen=True)
class SupervisedSglang(SglangServer):
    """One that `pagegate engine up` runs: killed, it is started again."""

    def engine_pid(self) -> int | None:
        """Of the server that runs at this moment."""
        try:
            [supervisor] = psutil.Process(self.process.pid).children()[:1]
            found = [child for child in supervisor.children() if "sglang.launch_server" in child.cmdline()]
        except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError):
            return None
        return found[0].pid if found else None

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        pid = self.engine_pid()
        assert pid is not None, "it runs"
        os.killpg(pid, number)

    def close(self) -> None:
        """The supervisor ends its engine, and the guard its supervisor."""
        assert self.process.stdin is not None, "the guard's pipe"
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S_MAX)
        _kill(self.process)


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
            "extra": (*CPU_FLAGS, "--dtype", "bfloat16", *flags),
            "environment": CPU_ENVIRONMENT | environment,
        },
    }


def _threads(count: int | None) -> dict[str, str]:
    """On the first cores; None: as SGLang likes."""
    if count is None:
        return {}
    cores = "0" if count == 1 else f"0-{count - 1}"
    return {"OMP_NUM_THREADS": str(count), "SGLANG_CPU_OMP_THREADS_BIND": cores}


def _unified(
    checkpoint: Path, model_id: str, page_tokens: int, *flags: str, threads: int | None, **fields: Any
) -> Model:
    engine = _engine(checkpoint, *flags, **_threads(threads))
    engine["launch"] |= fields.pop("launch", {})
    return _model(checkpoint, model_id, page_tokens=page_tokens, replicas=[engine | {"name": "cpu"}], **fields)


@contextlib.contextmanager
def start_sglang(
    checkpoint: Path,
    *,
    model_id: str = "contract",
    page_tokens: int = 16,
    plain: bool = False,
    threads: int | None = 1,
    launch: Mapping[str, Any] = MappingProxyType({}),
    context_tokens: int = 2048,
) -> Iterator[SglangServer]:
    """A server that is ready, with the page-tag plugin; all its processes end with the context.

    A plain one has neither page tags nor an FP8 cache: SGLang as it comes. threads: more than one wait for each other
    at every step, which a busy machine makes long. launch: other values for keys of that table.
    """
    fields: dict[str, Any] = {
        "launch": dict(launch),
        "limits": {"context_tokens": context_tokens, "output_tokens_max": context_tokens},
        "page_tags": not plain,
    }
    if plain:
        fields["kv_cache_dtype"] = "bf16"
    model = _unified(checkpoint, model_id, page_tokens, threads=threads, **fields)
    [command] = engine_commands(model)
    with _started(command, model) as server:
        _ready(server)
        yield server


@dataclass(frozen=True)
class WokenSglang:
    """One that `pagegate serve` has started for a request. gateway: where it answers."""

    url: str
    model: Model
    gateway: str
    admin_key: str

    def units(self) -> list[dict[str, Any]]:
        """As the operator sees them."""
        units: list[dict[str, Any]] = self._call("/console/v1/units", None)["units"]
        return units

    def order(self, order: str) -> None:
        self._call("/console/v1/units/orders", {"model": self.model.id, "order": order})

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        return _json_of(self.gateway + path, self.admin_key, body)

    def processes(self) -> list[psutil.Process]:
        """That live, of its server and of the parts of it."""
        return [
            part
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and {"sglang.launch_server", self.url.rpartition(":")[2]} <= set(process.info["cmdline"] or [])
            for part in _with_parts(process)
        ]


def _with_parts(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _json_of(url: str, key: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Raises HTTPError for what is refused."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=READY_S_MAX) as answer:
        said: dict[str, Any] = json.loads(answer.read())
        return said


@contextlib.contextmanager
def woken_sglang(checkpoint: Path, *, model_id: str = "contract", page_tokens: int = 16) -> Iterator[WokenSglang]:
    """Of a model that may sleep: `pagegate serve` was asked for an answer, which it has given. SGLang ends with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = _unified(
            checkpoint, model_id, page_tokens, threads=1, serverless={"idle_seconds": 86400},
            launch={"environment": CPU_ENVIRONMENT | _threads(1) | _variables(folder, forked=False)},
        )  # fmt: skip
        file, home, port = folder / "deployment.toml", folder / "home", free_port()
        file.write_text(f"models = [{_inline(model.model_dump(mode='json', by_alias=True, exclude_none=True))}]")
        copy_migrated(home)
        price_deployed(Settings.model_validate({"home": home, "cache_dir": folder, "deployment": file}))
        variables = {
            "PYTHONPATH": str(ROOT),
            "PAGEGATE_HOME": str(home),
            "PAGEGATE_PORT": str(port),
            "PAGEGATE_DEPLOYMENT": str(file),
            "PAGEGATE_GATEWAY__QUEUE_WAIT_SECONDS_MAX": str(READY_S_MAX),
        }
        gateway, log = f"http://127.0.0.1:{port}", folder / "serve.log"
        process = _guarded([sys.executable, "-m", "api"], variables, log)
        try:
            _answers(gateway + "/health", process, log)
            known = json.loads((home / "bootstrap.json").read_text())
            asked = {"model": model_id, "max_tokens": 2, "messages": [{"role": "user", "content": "Wake up."}]}
            _json_of(gateway + "/v1/chat/completions", known["api_key"], asked)
            yield WokenSglang(model.replicas[0].base_url, model, gateway, known["admin_key"])
        finally:
            _kill(process)


@contextlib.contextmanager
def engine_up(checkpoint: Path, *, model_id: str = "contract", page_tokens: int = 64) -> Iterator[SupervisedSglang]:
    """As an operator starts it: by `pagegate engine up` on a deployment file, ready, able to hold answers to a form."""
    model = _unified(checkpoint, model_id, page_tokens, *FORM_FLAGS, threads=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = _variables(folder)
        [replica] = model.replicas
        assert replica.launch is not None
        launch = replica.launch.model_copy(update={"environment": dict(replica.launch.environment) | variables})
        model = model.model_copy(update={"replicas": (replica.model_copy(update={"launch": launch}),)})
        file = folder / "deployment.toml"
        file.write_text(f"models = [{_inline(model.model_dump(mode='json', exclude_none=True))}]")
        command = [sys.executable, "-c", PAGEGATE, "engine", "up", model_id, "--deployment", str(file)]
        argv = [*command, "--log-dir", str(folder), "--drain-s", "1"]
        process = _guarded(argv, {"PYTHONPATH": str(ROOT)}, folder / "supervisor.log")
        server = SupervisedSglang(replica.base_url, model, process, folder / "cpu.log")
        try:
            _ready(server)
            yield server
        finally:
            server.close()


def _inline(value: Any) -> str:
    """As TOML writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return json.dumps(value)


def _ready(server: SglangServer) -> None:
    _answers(server.url, server.process, server.log)


def _answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    wait_until_ready(url=url, process=process, log=log, within_s=READY_S_MAX, every_s=0.2)


@contextlib.contextmanager
def start_encoder(checkpoint: Path, *, name: str) -> Iterator[str]:
    """The URL of SGLang that serves embeddings. Deployment files have no encoders: an operator types this."""
    port = free_port()
    argv = (
        *(str(sglang_python()), "-m", "sglang.launch_server", "--model-path", str(checkpoint)),
        *("--served-model-name", name, "--is-embedding", "--host", "127.0.0.1", "--port", str(port)),
        *("--max-total-tokens", "8192", "--enable-metrics", "--disable-radix-cache"),
        *(*CPU_FLAGS, "--dtype", "float32"),
    )
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        log = folder / "sglang.log"
        process = _guarded(argv, CPU_ENVIRONMENT | _threads(1) | _variables(folder), log)
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_ready(url=url, process=process, log=log, within_s=READY_S_MAX, every_s=0.2)
            yield url
        finally:
            _kill(process)


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
        "prefill": _engine(checkpoint, "--disable-overlap-schedule", **at_prefill, **_threads(1)),
        "decode": _engine(
            checkpoint, "--disaggregation-decode-retraction-backup", "cpu_tensor", **at_decode, **_threads(1)
        ),
    }
    model = _model(checkpoint, model_id, page_tokens=16, pairs=[pair])
    prefill_command, decode_command = engine_commands(model)
    with _started(prefill_command, model) as prefill, _started(decode_command, model) as decode:
        for server in (prefill, decode):
            _ready(server)
        yield SglangPair(model, prefill, decode)


@contextlib.contextmanager
def _started(command: EngineCommand, model: Model) -> Iterator[SglangServer]:
    """Started, not yet ready."""
    urls = {name: engine.base_url for name, _, engine in model.engines()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "sglang.log"
        process = _guarded(command.argv, _variables(folder) | dict(command.environment), log)
        server = SglangServer(urls[command.name], model, process, log)
        try:
            yield server
        finally:
            server.close()


def _variables(folder: Path, *, forked: bool = True) -> dict[str, str]:
    """folder: where what SGLang is to find by entry points may lie. forked: see cpu_fork.py."""
    plugins = _plugin_entry_points(folder / "plugins", forked=forked)
    return {"PYTHONPATH": f"{plugins}:{ROOT}", "PAGEGATE_PAGE_TAGS_FAULT": FAULTY_RID}


def _guarded(argv: Sequence[str], variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}  # noqa: TID251  as above
    with log.open("wb") as output:
        return subprocess.Popen(
            ["bash", "-c", GUARD, "guard", *argv],
            cwd=ROOT,
            env=inherited | dict(variables),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _kill(guard: subprocess.Popen[bytes]) -> None:
    """With all of its group. Idempotent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guard.pid, signal.SIGKILL)
    guard.wait(STOP_S_MAX)
    assert guard.stdin is not None, "its pipe"
    guard.stdin.close()


def _plugin_entry_points(folder: Path, *, forked: bool) -> Path:
    """What installing this project would leave in SGLang's environment for SGLang to find; and what a CPU needs."""
    info = folder / "pagegate_here-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pagegate-here\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\n"
        "pagegate-page-tags = backends.sglang.plugin:register\n"
        "pagegate-pooling = backends.sglang.pooling:register\n"
        "cpu-fp8 = tests.sglang_cpu.cpu_fp8:register\n"
        "cpu-pair = tests.sglang_cpu.cpu_pair:register\n" + "cpu-fork = tests.sglang_cpu.cpu_fork:register\n" * forked
    )
    return folder
