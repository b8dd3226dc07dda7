"""Tokens a second of the local engine beside transformers' `generate`: same weights, prompts and machine, in turns.

    python benchmarks/engine_speed.py [--rounds 3] [--tokens 64]

The engine is measured through its own process and HTTP, streaming; transformers in this process, in bfloat16, greedy.
Each round measures both, one after the other, so that what else the machine does hits both; the best round counts.
"""

import argparse
import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import torch
from transformers import AutoModelForCausalLM

from backends.local.tokenizer import Tokenizer
from tests.engines import real_model_path, start_local_engine

PROMPT = "Tell me a story about a lighthouse, number {}."
LONG_PROMPT_TOKENS = 2048
GOALS = {1: 1.5, 8: 1.0}
"""Concurrent streams, and how many times transformers' rate they must reach."""


@dataclass(frozen=True)
class Measured:
    engine: float
    transformers: float

    @property
    def ratio(self) -> float:
        return self.engine / self.transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens a stream")
    options = parser.parse_args()
    folder = real_model_path()
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": PROMPT.format(at)}]) for at in range(max(GOALS))]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    with start_local_engine(folder, threads=None, kv_cache_bytes=1 << 30) as engine:
        asyncio.run(run_streams(engine.url, prompts[:1], 8))
        generate(model, prompts[:1], 8)
        best = {streams: Measured(0.0, 1e-9) for streams in GOALS}
        for at in range(options.rounds):
            for streams in GOALS:
                mine = (
                    streams * options.tokens / asyncio.run(run_streams(engine.url, prompts[:streams], options.tokens))
                )
                theirs = streams * options.tokens / generate(model, prompts[:streams], options.tokens)
                best[streams] = Measured(max(best[streams].engine, mine), max(best[streams].transformers, theirs))
                print(f"round {at + 1}, {streams} streams: engine {mine:.1f} tok/s, transformers {theirs:.1f} tok/s")
        long_prompt = (prompts[0] * LONG_PROMPT_TOKENS)[:LONG_PROMPT_TOKENS]
        prefill = min(asyncio.run(run_streams(engine.url, [long_prompt], 1)) for _ in range(options.rounds))
    print_table(best, prefill)


def print_table(best: dict[int, Measured], prefill: float) -> None:
    print(f"\n{'streams':>8}{'engine':>14}{'transformers':>14}{'ratio':>8}{'goal':>8}")
    for streams, one in best.items():
        verdict = "" if one.ratio >= GOALS[streams] else "  below the goal"
        print(
            f"{streams:>8}{one.engine:>8.1f} tok/s{one.transformers:>8.1f} tok/s"
            f"{one.ratio:>8.2f}{GOALS[streams]:>8.1f}{verdict}"
        )
    print(f"prefill of {LONG_PROMPT_TOKENS} tokens: {LONG_PROMPT_TOKENS / prefill:.0f} tok/s")


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
