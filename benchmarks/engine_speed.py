"""Tokens a second of the local engine, in several precisions, beside others: same weights, prompts, machine, in turns.

    .venv/bin/python -m benchmarks.engine_speed [--rounds 3] [--tokens 48] [--streams 1 8 16] [--others sglang …]

The engine and SGLang are measured through their own processes and HTTP, streaming, and without a prefix cache's help;
transformers in this process, in bfloat16, greedy. Each round measures all of them, one after the other, so that what
else the machine does hits all; the best round counts. SGLang is the one that `make sglang` installs. An idle engine
sleeps. `--llama PYTHON FILE` adds llama.cpp: an interpreter that has llama-cpp-python, and the checkpoint's own GGUF
file, whose Q4_1 weights it computes with, all streams in one batch. On a machine that others use, `--cpu` gives each
contestant one thread and counts the CPU seconds of its processes, which waiting for a core does not lengthen.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import torch
from transformers import AutoModelForCausalLM

from backends.local.tokenizer import Tokenizer
from tests.engines import LocalEngine, real_model_path, start_local_engine
from tests.sglang_cpu.server import start_sglang

PROMPT = "Tell me a story about a lighthouse, number {}."
LONG_PROMPT_TOKENS = 1024
MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "int4 decode": {"decode_weights": "int4"},
    "int4 both": {"prefill_weights": "int4", "decode_weights": "int4"},
    "bf16, torch kernels": {"torch_kernels": True},
}
GOALS = {
    ("sglang", 1): 4.0,
    ("sglang", 8): 3.0,
    ("sglang", 16): 3.0,
    ("transformers", 1): 1.5,
    ("transformers", 8): 1.0,
    ("llama.cpp", 1): 0.8,
    ("llama.cpp", 16): 1.5,
}
"""How many times another's rate the engine should reach at so many streams."""


@dataclass(frozen=True)
class Contestant:
    generate: Callable[[int], None]
    """All tokens of so many streams."""
    cpu_seconds: Callable[[], float]
    """Of all its processes and threads, since they started."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="output tokens a stream")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--others", nargs="*", default=["transformers"], choices=["transformers", "sglang"])
    parser.add_argument("--llama", nargs=2, metavar=("PYTHON", "FILE"), help="measure llama.cpp with this GGUF file")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds, with one thread each, on a busy machine")
    options = parser.parse_args()
    threads = 1 if options.cpu else None
    folder = real_model_path()
    prompts = _prompts(folder, max(options.streams))
    with contextlib.ExitStack() as running:
        contestants: dict[str, Contestant] = {}
        if "sglang" in options.others:
            server = running.enter_context(start_sglang(folder, plain=True, threads=threads))
            contestants["sglang"] = _over_http(server.url, server.process.pid, prompts, options.tokens)
        if options.llama is not None:
            child = running.enter_context(_start_llama(options.llama, threads or os.cpu_count() or 1))
            contestants["llama.cpp"] = _over_pipe(child, prompts, options.tokens)
        urls = {}
        for mode in options.modes:
            engine = running.enter_context(_start(folder, mode, threads))
            urls[mode] = engine.url
            contestants[mode] = _over_http(engine.url, engine.process.pid, prompts, options.tokens)
        if "transformers" in options.others:
            contestants["transformers"] = _transformers(folder, prompts, options.tokens, threads)
        for contestant in contestants.values():
            contestant.generate(1)
        best = _measure(contestants, options)
        prefill = {} if options.cpu else _measure_prefill(urls, folder, options.rounds)
    print_table(best, prefill, options.streams, "CPU second, one thread" if options.cpu else "second")


def _prompts(folder: Path, count: int) -> list[list[int]]:
    tokenizer = Tokenizer(folder)
    return [tokenizer.encode_chat([{"role": "user", "content": PROMPT.format(at)}]) for at in range(count)]


@contextlib.contextmanager
def _start(folder: Path, mode: str, threads: int | None) -> Iterator[LocalEngine]:
    flags: dict[str, Any] = {"threads": threads, "kv_cache_bytes": 256 << 20, "disable_radix_cache": True}
    with start_local_engine(folder, **flags, **MODES[mode]) as engine:
        yield engine


def _over_http(url: str, pid: int, prompts: list[list[int]], tokens: int) -> Contestant:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    def cpu_seconds() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    return Contestant(lambda streams: asyncio.run(run_streams(url, prompts[:streams], tokens)), cpu_seconds)


@contextlib.contextmanager
def _start_llama(of: list[str], threads: int) -> Iterator["subprocess.Popen[bytes]"]:
    python, file = of
    command = [python, str(Path(__file__).with_name("engine_speed_llama.py")), file, str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            yield child
        finally:
            child.kill()


def _over_pipe(child: "subprocess.Popen[bytes]", prompts: list[list[int]], tokens: int) -> Contestant:
    process = psutil.Process(child.pid)

    def generate(streams: int) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(orjson.dumps({"prompts": prompts[:streams], "tokens": tokens}) + b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"done\n"

    return Contestant(generate, lambda: process.cpu_times().user + process.cpu_times().system)


def _transformers(folder: Path, prompts: list[list[int]], tokens: int, threads: int | None) -> Contestant:
    if threads is not None:
        torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return Contestant(lambda streams: generate(model, prompts[:streams], tokens), time.process_time)


def _measure(contestants: dict[str, Contestant], options: argparse.Namespace) -> dict[tuple[str, int], float]:
    """Tokens a second, or a CPU second, at each number of streams: the best of all rounds."""
    best: dict[tuple[str, int], float] = {}
    for at in range(options.rounds):
        for count in options.streams:
            for name, contestant in contestants.items():
                clock = contestant.cpu_seconds if options.cpu else time.perf_counter
                began = clock()
                contestant.generate(count)
                rate = count * options.tokens / (clock() - began)
                best[name, count] = max(best.get((name, count), 0.0), rate)
                print(f"round {at + 1}, {count} streams, {name}: {rate:.1f} tok/s", flush=True)
    return best


def _measure_prefill(urls: dict[str, str], folder: Path, rounds: int) -> dict[str, float]:
    prompt = (_prompts(folder, 1)[0] * LONG_PROMPT_TOKENS)[:LONG_PROMPT_TOKENS]
    best: dict[str, float] = {}
    for _ in range(rounds):
        for mode, url in urls.items():
            began = time.perf_counter()
            asyncio.run(run_streams(url, [prompt], 1))
            best[mode] = max(best.get(mode, 0.0), LONG_PROMPT_TOKENS / (time.perf_counter() - began))
    return best


def print_table(best: dict[tuple[str, int], float], prefill: dict[str, float], streams: list[int], second: str) -> None:
    names = list(dict.fromkeys(name for name, _ in best))
    print(
        f"\ntokens a {second} (and over that of bf16)\n{'':<21}"
        + "".join(f"{f'{count} streams':>20}" for count in streams)
        + f"{'prefill':>12}"
    )
    for name in names:
        cells = [f"{best[name, count]:.1f} ({best[name, count] / best['bf16', count]:.2f})" for count in streams]
        prompt = f"{prefill[name]:.0f}" if name in prefill else ""
        print(f"{name:<21}" + "".join(f"{cell:>20}" for cell in cells) + f"{prompt:>12}")
    for (other, count), goal in GOALS.items():
        for mode in ("bf16", "int4 decode"):
            if (other, count) in best and (mode, count) in best:
                ratio = best[mode, count] / best[other, count]
                verdict = "" if ratio >= goal else "  below the goal"
                print(f"{mode} / {other}, {count} streams: {ratio:.2f}, goal {goal}{verdict}")


async def run_streams(url: str, prompts: list[list[int]], tokens: int) -> None:
    async with aiohttp.ClientSession() as session:
        produced = await asyncio.gather(*(stream(session, url, prompt, tokens) for prompt in prompts))
        assert produced == [tokens] * len(prompts)


async def stream(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> int:
    body = {
        "model": "any", "messages": [{"role": "user", "content": "read as input_ids"}],
        "input_ids": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage = b""
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if b'"usage"' in line:
                usage = line
    completion_tokens = orjson.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    assert isinstance(completion_tokens, int)
    return completion_tokens


def generate(model: Any, prompts: list[list[int]], tokens: int) -> None:
    """One batched call; prompts are cut to one length, so that no padding slows it."""
    shortest = min(len(prompt) for prompt in prompts)
    batch = torch.tensor([prompt[:shortest] for prompt in prompts])
    output = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens, do_sample=False)
    assert output.shape[1] == shortest + tokens


if __name__ == "__main__":
    main()
