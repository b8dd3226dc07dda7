"""Tokens a second of the local engine, in several precisions, beside others: same weights, prompts, machine, in turns.

    .venv/bin/python -m benchmarks.engine_speed [--rounds 3] [--tokens 48] [--streams 1 8 16] [--others sglang …]

The engine and SGLang are measured through their own processes and HTTP, streaming, and without a prefix cache's help;
transformers in this process, in bfloat16, greedy. Each round measures all of them, one after the other, so that what
else the machine does hits all; the best round counts. SGLang is the one that `make sglang` installs. An idle engine
sleeps.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import torch
from transformers import AutoModelForCausalLM

from backends.local.tokenizer import Tokenizer
from tests.engines import real_model_path, start_local_engine
from tests.sglang_cpu.server import start_sglang

PROMPT = "Tell me a story about a lighthouse, number {}."
LONG_PROMPT_TOKENS = 1024
MODES: dict[str, dict[str, object]] = {
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
}
"""How many times another's rate the engine in bf16 must reach at so many streams."""

Run = Callable[[int], float]
"""Tokens a second at so many streams."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="output tokens a stream")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--others", nargs="*", default=["transformers"], choices=["transformers", "sglang"])
    options = parser.parse_args()
    folder = real_model_path()
    prompts = _prompts(folder, max(options.streams))
    with contextlib.ExitStack() as running:
        urls = {mode: running.enter_context(_start(folder, mode)) for mode in options.modes}
        if "sglang" in options.others:
            urls["sglang"] = running.enter_context(start_sglang(folder, plain=True)).url
        runs: dict[str, Run] = {name: _over_http(url, prompts, options.tokens) for name, url in urls.items()}
        if "transformers" in options.others:
            runs["transformers"] = _transformers(folder, prompts, options.tokens)
        for run in runs.values():
            run(1)
        best = _measure(runs, options.streams, options.rounds)
        prefill = _measure_prefill({mode: urls[mode] for mode in options.modes}, folder, options.rounds)
    print_table(best, prefill, options.streams)


def _prompts(folder: Path, count: int) -> list[list[int]]:
    tokenizer = Tokenizer(folder)
    return [tokenizer.encode_chat([{"role": "user", "content": PROMPT.format(at)}]) for at in range(count)]


@contextlib.contextmanager
def _start(folder: Path, mode: str) -> Any:
    flags: dict[str, object] = {"threads": None, "kv_cache_bytes": 256 << 20, "disable_radix_cache": True}
    with start_local_engine(folder, **(flags | MODES[mode])) as engine:
        yield engine.url


def _over_http(url: str, prompts: list[list[int]], tokens: int) -> Run:
    return lambda streams: streams * tokens / asyncio.run(run_streams(url, prompts[:streams], tokens))


def _transformers(folder: Path, prompts: list[list[int]], tokens: int) -> Run:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    return lambda streams: streams * tokens / generate(model, prompts[:streams], tokens)


def _measure(runs: dict[str, Run], streams: list[int], rounds: int) -> dict[tuple[str, int], float]:
    best: dict[tuple[str, int], float] = {}
    for at in range(rounds):
        for count in streams:
            for name, run in runs.items():
                rate = run(count)
                best[name, count] = max(best.get((name, count), 0.0), rate)
                print(f"round {at + 1}, {count} streams, {name}: {rate:.1f} tok/s", flush=True)
    return best


def _measure_prefill(urls: dict[str, str], folder: Path, rounds: int) -> dict[str, float]:
    prompt = (_prompts(folder, 1)[0] * LONG_PROMPT_TOKENS)[:LONG_PROMPT_TOKENS]
    best: dict[str, float] = {}
    for _ in range(rounds):
        for mode, url in urls.items():
            seconds = asyncio.run(run_streams(url, [prompt], 1))
            best[mode] = max(best.get(mode, 0.0), LONG_PROMPT_TOKENS / seconds)
    return best


def print_table(best: dict[tuple[str, int], float], prefill: dict[str, float], streams: list[int]) -> None:
    names = list(dict.fromkeys(name for name, _ in best))
    print("\ntok/s (of it by bf16)" + "".join(f"{f'{count} streams':>20}" for count in streams) + f"{'prefill':>12}")
    for name in names:
        cells = [f"{best[name, count]:.1f} ({best[name, count] / best['bf16', count]:.2f})" for count in streams]
        prompt = f"{prefill[name]:.0f}" if name in prefill else ""
        print(f"{name:<21}" + "".join(f"{cell:>20}" for cell in cells) + f"{prompt:>12}")
    for (other, count), goal in GOALS.items():
        if (other, count) in best:
            ratio = best["bf16", count] / best[other, count]
            verdict = "" if ratio >= goal else "  below the goal"
            print(f"bf16 / {other}, {count} streams: {ratio:.2f}, goal {goal}{verdict}")


async def run_streams(url: str, prompts: list[list[int]], tokens: int) -> float:
    """Seconds from the first request to the last token of all."""
    async with aiohttp.ClientSession() as session:
        began = time.perf_counter()
        produced = await asyncio.gather(*(stream(session, url, prompt, tokens) for prompt in prompts))
        assert produced == [tokens] * len(prompts)
        return time.perf_counter() - began


async def stream(session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int) -> int:
    body = {
        "input_ids": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage = b""
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if b'"usage"' in line:
                usage = line
    completion_tokens = orjson.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    assert isinstance(completion_tokens, int)
    return completion_tokens


def generate(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of one batched call; prompts are cut to one length, so that no padding slows it."""
    shortest = min(len(prompt) for prompt in prompts)
    batch = torch.tensor([prompt[:shortest] for prompt in prompts])
    began = time.perf_counter()
    output = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens, do_sample=False)
    assert output.shape[1] == shortest + tokens
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
