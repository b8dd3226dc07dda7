"""What FP8 keys and INT4 decode weights do to the answers, against bf16, on the default checkpoint.

    .venv/bin/python -m benchmarks.quality divergence --data DIR [--tokens 20000]
    .venv/bin/python -m benchmarks.quality choice --data DIR [--items 200]

DIR holds gsm8k_test.jsonl, piqa_valid.jsonl with piqa_valid_labels.lst, and mmlu_test_sample.jsonl.

All variants see the same tokens, and every token that is scored comes out of a decode step: a text's head is prefilled,
then one token a step is fed, whatever the model would have said. Scoring by prefill would never touch decode weights.
`divergence` compares next-token distributions on GSM8K's text: Kullback-Leibler divergence from bf16 and agreement of
the most likely token. `choice` picks the answer with the highest log-likelihood (PIQA: by byte of the answer).
Intervals are 95 %, normal, over texts or items, of paired differences.

The checkpoint is dequantised from Q4_1 (blocks of 32): its weights lie on a grid of four bits already, so what INT4 in
groups of 64 costs here says little about a model that was never quantised.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

import torch
from torch import Tensor

from backends.local.detokenizer import TextStream
from backends.local.kv.pool import KVPool, stored_dtype
from backends.local.loading import load_model
from backends.local.models.llama import Llama
from backends.local.precision import KVPrecision, WeightPrecision
from backends.local.runner import ModelRunner
from backends.local.scheduler import Chunk, StepPlan
from backends.local.sequence import SamplingParams, Sequence
from backends.local.settings import EngineSettings
from backends.local.tokenizer import Tokenizer
from tests.engines import real_model_path

T = TypeVar("T")

BATCH = 32
PAGE = 16
HEAD_TOKENS = 16
"""Of a text, prefilled before the first scored token."""
DECODED_PROMPT_TOKENS = 4
"""The last ones of a question: decoded, so that the first token of the answer is scored by decode weights, too."""
REFERENCE = "bf16"
VARIANTS = {
    REFERENCE: (KVPrecision.BF16, WeightPrecision.BF16),
    "fp8 cache": (KVPrecision.FP8_E4M3, WeightPrecision.BF16),
    "int4 decode": (KVPrecision.BF16, WeightPrecision.INT4),
    "both": (KVPrecision.FP8_E4M3, WeightPrecision.INT4),
}


class Forced:
    """One variant that is fed batches of given texts."""

    def __init__(self, model: Llama, cache: KVPrecision, decode: WeightPrecision, *, pages: int) -> None:
        config = model.config
        pool = KVPool(
            layers=config.layers, pages=pages, page_size=PAGE, kv_heads=config.kv_heads, head_size=config.head_size,
            dtype=config.dtype, stored=stored_dtype(cache, config.dtype),
        )  # fmt: skip
        self._runner = ModelRunner(
            model, pool, prefill_weights=WeightPrecision.BF16, decode_weights=decode, threads=None, clock=time.monotonic
        )
        self._sequences: list[Sequence] = []

    def prefill(self, heads: Rows[list[int]], lengths: Rows[int]) -> None:
        """Start a batch: the first tokens of each text, and how long it will become."""
        numbers = itertools.count()
        self._sequences = [
            Sequence(
                rid=str(at), prompt_tokens=len(head), tokens=list(head), max_new_tokens=length - len(head),
                sampling=SamplingParams(temperature=0.0), text=TextStream([]),
                pages=list(itertools.islice(numbers, -(-length // PAGE))),
            )
            for at, (head, length) in enumerate(zip(heads, lengths, strict=True))
        ]  # fmt: skip
        for sequence in self._sequences:
            self._runner.run(StepPlan(prefill=[Chunk(sequence, 0, len(sequence.tokens))]))
            sequence.computed = len(sequence.tokens)

    def decode(self, tokens: dict[int, int]) -> dict[int, Tensor]:
        """Feed one token to each of these texts: what the model then expects next, as log-probabilities."""
        fed = [self._sequences[at] for at in tokens]
        for sequence, token in zip(fed, tokens.values(), strict=True):
            sequence.tokens.append(token)
        ran, logits = self._runner.run(StepPlan(decode=list(fed)))
        assert logits is not None
        for sequence in fed:
            sequence.computed += 1
        rows = logits.float().log_softmax(-1)
        return {int(sequence.rid): row for sequence, row in zip(ran, rows, strict=True)}


@dataclass(slots=True)
class Divergence:
    """Of one variant; a number per text."""

    nats: list[float] = field(default_factory=list)
    agreeing: list[float] = field(default_factory=list)


def divergence(variants: dict[str, Forced], texts: list[list[int]]) -> None:
    found = {name: Divergence() for name in variants if name != REFERENCE}
    scored = 0
    for batch in _batches(texts, BATCH):
        for variant in variants.values():
            variant.prefill([text[:HEAD_TOKENS] for text in batch], [len(text) for text in batch])
        nats = {name: [0.0] * len(batch) for name in found}
        agreeing = {name: [0] * len(batch) for name in found}
        for position in range(HEAD_TOKENS, max(map(len, batch))):
            fed = {at: text[position] for at, text in enumerate(batch) if position < len(text)}
            rows = {name: variant.decode(fed) for name, variant in variants.items()}
            reference = torch.stack([rows[REFERENCE][at] for at in fed])
            for name in found:
                other = torch.stack([rows[name][at] for at in fed])
                terms = (reference.exp() * (reference - other)).sum(-1).tolist()
                same = (reference.argmax(-1) == other.argmax(-1)).tolist()
                for at, term, one in zip(fed, terms, same, strict=True):
                    nats[name][at] += term
                    agreeing[name][at] += one
        for name, one in found.items():
            for at, text in enumerate(batch):
                one.nats.append(nats[name][at] / (len(text) - HEAD_TOKENS))
                one.agreeing.append(agreeing[name][at] / (len(text) - HEAD_TOKENS))
        scored += sum(len(text) - HEAD_TOKENS for text in batch)
        print(f"\n{scored} tokens of {len(found['both'].nats)} texts, each through a decode step", flush=True)
        print(f"{'':<14}{'KL from bf16, nats a token':>30}{'same top token':>24}")
        for name, one in found.items():
            print(f"{name:<14}{interval(one.nats, 4):>30}{interval([100 * x for x in one.agreeing], 2) + ' %':>24}")


@dataclass(frozen=True, slots=True)
class Item:
    prompt: list[int]
    answers: list[list[int]]
    weights: list[float]
    """What an answer's log-likelihood is divided by."""
    correct: int

    @property
    def read(self) -> list[list[int]]:
        """The answers whose tokens must be fed: answers of one token are all expected at the same place."""
        return self.answers[:1] if all(len(answer) == 1 for answer in self.answers) else self.answers


def choice(variants: dict[str, Forced], tasks: dict[str, list[Item]]) -> None:
    for task, items in tasks.items():
        right: dict[str, list[float]] = {name: [] for name in variants}
        for batch in _batches(items, BATCH // 2):
            for name, variant in variants.items():
                right[name] += [float(one) for one in _answered(variant, batch)]
        print(f"\n{task}, {len(items)} items\n{'':<14}{'accuracy, %':>18}{'against bf16, points':>26}", flush=True)
        for name, one in right.items():
            deltas = [100 * (x - y) for x, y in zip(one, right[REFERENCE], strict=True)]
            print(f"{name:<14}{interval([100 * x for x in one], 1):>18}{interval(deltas, 1):>26}", flush=True)


def _answered(variant: Forced, items: Rows[Item]) -> Iterator[bool]:
    """For each item: does the variant prefer the right answer?"""
    texts = [(item, answer) for item in items for answer in item.read]
    heads = [item.prompt[:-DECODED_PROMPT_TOKENS] for item, _ in texts]
    tails = [item.prompt[-DECODED_PROMPT_TOKENS:] + answer for item, answer in texts]
    variant.prefill(heads, [len(head) + len(tail) for head, tail in zip(heads, tails, strict=True)])
    expected: list[list[Tensor]] = [[] for _ in texts]
    # What is fed last expects nothing that is scored.
    for position in range(max(map(len, tails)) - 1):
        fed = {at: tail[position] for at, tail in enumerate(tails) if position < len(tail) - 1}
        for at, row in variant.decode(fed).items():
            if position + 1 >= DECODED_PROMPT_TOKENS:
                expected[at].append(row)
    rows = iter(expected)
    for item in items:
        read = [next(rows) for _ in item.read]
        of_answers = read if len(read) == len(item.answers) else read * len(item.answers)
        scores = [
            sum(float(row[token]) for row, token in zip(of_answer, answer, strict=True)) / weight
            for of_answer, answer, weight in zip(of_answers, item.answers, item.weights, strict=True)
        ]
        yield scores.index(max(scores)) == item.correct


def _batches(things: Rows[T], size: int) -> Iterator[Rows[T]]:
    return (things[at : at + size] for at in range(0, len(things), size))


def interval(values: Rows[float], digits: int) -> str:
    half = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return f"{fmean(values):.{digits}f} ± {half:.{digits}f}"


def gsm8k(data: Path, tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    texts: list[list[int]] = []
    wanted = tokens
    for line in _lines(data / "gsm8k_test.jsonl"):
        problem = json.loads(line)
        text = tokenizer.encode(f"Question: {problem['question']}\nAnswer: {problem['answer']}")
        if wanted <= 0:
            break
        texts.append(text)
        wanted -= len(text) - HEAD_TOKENS
    return texts


def piqa(data: Path, tokenizer: Tokenizer, items: int) -> list[Item]:
    labels = _lines(data / "piqa_valid_labels.lst")
    problems = [json.loads(line) for line in _lines(data / "piqa_valid.jsonl")]
    return [
        Item(
            tokenizer.encode(f"Question: {problem['goal']}\nAnswer:"),
            [tokenizer.encode(f" {problem[answer]}") for answer in ("sol1", "sol2")],
            [float(len(problem[answer].encode())) for answer in ("sol1", "sol2")],
            int(label),
        )
        for problem, label in list(zip(problems, labels, strict=True))[:items]
    ]


def mmlu(data: Path, tokenizer: Tokenizer, items: int) -> list[Item]:
    problems = [json.loads(line) for line in _lines(data / "mmlu_test_sample.jsonl")]
    # Spread over all subjects: the file is sorted by them.
    chosen = problems[:: max(1, len(problems) // items)][:items]
    return [_mmlu_item(problem, tokenizer) for problem in chosen]


def _mmlu_item(problem: dict[str, object], tokenizer: Tokenizer) -> Item:
    choices = problem["choices"]
    assert isinstance(choices, list)
    assert isinstance(problem["answer"], int)
    lines = [f"{letter}. {text}" for letter, text in zip("ABCD", choices, strict=True)]
    prompt = f"The following is a multiple choice question.\n\n{problem['question']}\n" + "\n".join(lines) + "\nAnswer:"
    answers = [tokenizer.encode(f" {letter}") for letter in "ABCD"]
    return Item(tokenizer.encode(prompt), answers, [1.0] * 4, problem["answer"])


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise SystemExit(f"{path} is missing: --data names a folder with the evaluation files (see --help)")
    return path.read_text(encoding="utf-8").splitlines()


TASKS = {"piqa": piqa, "mmlu": mmlu}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["divergence", "choice"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000, help="to score, in whole texts")
    parser.add_argument("--items", type=int, default=200, help="of each task")
    parser.add_argument("--threads", type=int, help="default: torch's own choice; fewer on a machine that others use")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = real_model_path()
    tokenizer = Tokenizer(folder)
    texts: list[list[int]] = []
    tasks: dict[str, list[Item]] = {}
    if options.what == "divergence":
        texts = gsm8k(options.data, tokenizer, options.tokens)
    else:
        tasks = {task: TASKS[task](options.data, tokenizer, options.items) for task in options.tasks}
    settings = EngineSettings(model_path=folder, served_model_name="quality", decode_weights=WeightPrecision.INT4)
    model = load_model(settings)
    print(f"{folder.name}, dequantised from Q4_1; {model.kernels} kernels; batches of {BATCH}")
    variants = {name: Forced(model, *formats, pages=2048) for name, formats in VARIANTS.items()}
    if options.what == "divergence":
        divergence(variants, texts)
    else:
        choice(variants, tasks)


if __name__ == "__main__":
    main()
