"""Local engines for tests: a tiny checkpoint made on the spot, a process on a free port, the real checkpoint."""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from backends.checkpoints import DEFAULT_CHECKPOINT, checkpoint_path, default_cache_dir

ROOT = Path(__file__).resolve().parent.parent
# Below those of backends/supervision.py, and of the systems: Linux' begin at 32,768, those of macOS at 49,152.
_PORTS = range(10_000, 16_384)
READY_SECONDS_MAX = 180
STOP_SECONDS_MAX = 10

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IM_END = 2
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SENTENCES = (
    "the pages are the scarce thing, so the gate is driven by pages",
    "a request that can never fit is told so at once, and nothing is lost",
    "北京 und Köln: größer 🙂 smiles in four bytes 🙂🙂",
)
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "vocab_size": 384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": IM_END,
    "torch_dtype": "float32",
}

# Processes with neighbouring ids begin far from each other.
_ports = islice(cycle(_PORTS), 1_009 * os.getpid() % len(_PORTS), None)


def build_tiny_checkpoint(path: Path, **config: Any) -> Path:
    """A Llama of two small layers with random float32 weights and a byte-level tokenizer, in Hugging Face layout.

    Its greedy text is ASCII and never ends by itself: rows of the head that would say otherwise are zero.
    """
    path.mkdir(parents=True, exist_ok=True)
    merged = TINY_CONFIG | config
    tokenizer = _tiny_tokenizer(merged["vocab_size"])
    tokenizer.save(str(path / "tokenizer.json"))
    weights = _tiny_weights(merged)
    for token in range(merged["vocab_size"]):
        if not tokenizer.decode([token], skip_special_tokens=True).isprintable() or not _is_ascii(tokenizer, token):
            weights["lm_head.weight"][token] = 0.0
    if merged["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors")
    _write(path / "config.json", merged)
    _write(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": IM_END, "pad_token_id": IM_END})
    _write(
        path / "tokenizer_config.json",
        {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "unk_token": SPECIALS[0], "chat_template": TEMPLATE},
    )
    return path


@dataclass(frozen=True)
class LocalEngine:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextlib.contextmanager
def start_local_engine(
    model_path: Path, *, module: str = "backends.local.server", **flags: object
) -> Iterator[LocalEngine]:
    """A process that is ready; `max_running_requests=1` becomes `--max-running-requests 1`, True a bare flag."""
    with _started(model_path, module=module, **flags) as engine:
        _wait_for(engine)
        yield engine


@contextlib.contextmanager
def start_local_pair(model_path: Path, **flags: object) -> Iterator[tuple[LocalEngine, LocalEngine, int]]:
    """Prefill and decode, started together and ready, and the port at which pages are handed over."""
    port = free_port()
    meeting: dict[str, Any] = flags | {"disaggregation_bootstrap_port": port}
    with (
        _started(model_path, role="prefill", **meeting) as prefill,
        _started(model_path, role="decode", **meeting) as decode,
    ):
        for half in (prefill, decode):
            _wait_for(half)
        yield prefill, decode, port


def _wait_for(engine: LocalEngine) -> None:
    wait_until_ready(url=engine.url, process=engine.process, log=engine.log, within_s=READY_SECONDS_MAX, every_s=0.02)


@contextlib.contextmanager
def _started(model_path: Path, *, module: str = "backends.local.server", **flags: object) -> Iterator[LocalEngine]:
    """Not yet ready."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "engine.log"
        port = free_port()
        command = engine_command(model_path, module=module, port=port, **flags)
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=stderr)
        engine = LocalEngine(f"http://127.0.0.1:{port}", process, log)
        try:
            yield engine
        finally:
            _stop(process)


def engine_command(model_path: Path, *, module: str = "backends.local.server", **flags: object) -> list[str]:
    chosen = {"kv_cache_bytes": 4 << 20, "threads": 1, "exit_with_parent": True} | flags
    command = [sys.executable, "-m", module, "--model-path", str(model_path)]
    for name, value in chosen.items():
        if value is True:
            command.append(f"--{name.replace('_', '-')}")
        elif value is not False and value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def real_model_path() -> Path:
    """The default checkpoint in the user's cache; `pagegate models pull` puts it there."""
    cache_dir = default_cache_dir(os.environ)  # noqa: TID251  tests stand where api/settings.py would
    path = checkpoint_path(DEFAULT_CHECKPOINT, cache_dir)
    assert path.is_dir(), f"{path} is missing: run `pagegate models pull`"
    return path


def free_port() -> int:
    """One that nobody has until whoever asks listens there, which may be seconds later: the system gives none of these
    to those who ask for any, nor does the service to its engines, and each process of tests begins elsewhere.
    """
    for port in islice(_ports, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def wait_until_ready(*, url: str, process: subprocess.Popen[bytes], log: Path, within_s: float, every_s: float) -> None:
    """Of whichever engine: fails with the end of its log when its process has ended or the time is over."""
    deadline = time.monotonic() + within_s
    while not _is_ready(url):
        assert process.poll() is None, f"the engine ended: {_tail(log)}"
        assert time.monotonic() < deadline, f"the engine is not ready: {_tail(log)}"
        time.sleep(every_s)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:] if log.exists() else "(it has no log)"


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        pass
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _tiny_tokenizer(vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer


def _tiny_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> Tensor:
        # Twice the usual spread: logits then differ by far more than float32 rounds, and attention matters.
        return torch.randn(rows, columns, generator=generator) * (2.0 / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * size, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * size, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * size, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * size),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights


def _is_ascii(tokenizer: Tokenizer, token: int) -> bool:
    text = tokenizer.decode([token], skip_special_tokens=True)
    return bool(text) and text.isascii()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2))
