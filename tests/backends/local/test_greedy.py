"""The engine's greedy output against transformers' on the same bfloat16 weights.

For each prompt the engine produces its tokens through the whole path: batched, chunked, paged. Then one transformers
forward over prompt and output says, at every position, what transformers would have chosen after the same tokens.
Where the two differ, transformers' logits of both candidates must lie within bfloat16's rounding of each other.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.local.detokenizer import TextStream
from backends.local.engine import Engine
from backends.local.loading import load_engine
from backends.local.precision import KVPrecision, WeightPrecision
from backends.local.sequence import SamplingParams, Sequence
from backends.local.settings import EngineSettings
from backends.local.tokenizer import Tokenizer
from tests.backends.local.reference import transformers
from tests.engines import real_model_path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

OUTPUT_TOKENS = 24
GAP_MAX = 0.5
"""Logits up to 32 are stored in steps of 0.125: two candidates one step of rounding apart on either side, twice.
Measured on an AVX-512 machine: 11 of 1,161 choices differ, by 0.25 at most."""
TOPICS = (
    "the capital of France", "photosynthesis", "prime numbers", "the French Revolution", "black holes", "sourdough",
    "TCP congestion control", "the water cycle", "Shakespeare's sonnets", "compound interest", "volcanoes", "jazz",
    "the immune system", "binary search", "the Silk Road", "chess openings", "plate tectonics", "impressionism",
    "the Pythagorean theorem", "honey bees", "the Moon landing", "inflation", "glaciers", "recursion", "tea",
)  # fmt: skip
QUESTIONS = [f"What is {topic}?" for topic in TOPICS] + [
    f"Write a short note of three sentences on {topic} for a newspaper whose readers are curious, and say why "
    f"anybody should care about {topic} today. " + "Use plain words. " * (at % 9)
    for at, topic in enumerate(TOPICS)
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_model_path()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    settings = EngineSettings(
        model_path=folder, served_model_name="real", kv_cache_bytes=64 << 20, chunked_prefill_size=100
    )
    return load_engine(settings, time.monotonic)


def generate(engine: Engine, tokenizer: Tokenizer, questions: list[str]) -> list[Sequence]:
    sequences = []
    for at, question in enumerate(questions):
        prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
        sequence = Sequence(
            rid=str(at),
            prompt_tokens=len(prompt),
            tokens=prompt,
            max_new_tokens=OUTPUT_TOKENS,
            sampling=SamplingParams(temperature=0.0),
            text=TextStream(tokenizer.token_bytes),
            stop_token_ids=tokenizer.stop_token_ids,
        )
        engine.submit(sequence)
        sequences.append(sequence)
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    return sequences


def test_greedy_output_is_that_of_transformers(engine: Engine, folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert len(QUESTIONS) == 50
    sequences = generate(engine, tokenizer, QUESTIONS)
    reference = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    compared, gaps = 0, []
    for sequence in sequences:
        with torch.inference_mode():
            logits = reference(torch.tensor([sequence.tokens[:-1]])).logits[0, sequence.prompt_tokens - 1 :].float()
        chosen = torch.tensor(sequence.tokens[sequence.prompt_tokens :])
        gap = logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]
        compared += len(gap)
        gaps += gap[gap > 0].tolist()
    assert compared > 50 * OUTPUT_TOKENS * 0.8, "few answers end early"
    assert max(gaps, default=0.0) <= GAP_MAX, sorted(gaps)
    assert len(gaps) <= 0.03 * compared, f"{len(gaps)} of {compared} choices differ"


def test_it_knows_the_capital_of_france(engine: Engine, folder: Path) -> None:
    assert "Paris" in answer(engine, folder, "What is the capital of France?")


@pytest.mark.parametrize(
    "formats",
    [
        {"compiled_kernels": False},
        {"kv_cache_dtype": KVPrecision.FP8_E4M3},
        {"kv_cache_dtype": KVPrecision.FP8_E4M3, "compiled_kernels": False},
        {"kv_cache_dtype": KVPrecision.FP8_E4M3, "decode_weights": WeightPrecision.INT4},
        {"prefill_weights": WeightPrecision.FP8, "decode_weights": WeightPrecision.INT4},
    ],
)
def test_in_every_format_it_still_answers_what_was_asked(folder: Path, formats: dict[str, Any]) -> None:
    settings = EngineSettings(model_path=folder, served_model_name="real", kv_cache_bytes=8 << 20, **formats)
    engine = load_engine(settings, time.monotonic)
    assert "hotosynthesis is a" in answer(engine, folder, "What is photosynthesis?")


def answer(engine: Engine, folder: Path, question: str) -> str:
    tokenizer = Tokenizer(folder)
    (sequence,) = generate(engine, tokenizer, [question])
    return b"".join(tokenizer.token_bytes[token] for token in sequence.tokens[sequence.prompt_tokens :]).decode()
