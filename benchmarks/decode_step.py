"""CPU time of one step of the local engine on one thread: by rows, precision and kernels, and what it is made of.

    .venv/bin/python -m benchmarks.decode_step [--context 200] [--repeats 8] [--transformers]

Time is the thread's own CPU time, the best of the repeats, all variants in turn: waiting for a core on a machine that
others use does not count, though they do take memory bandwidth. Beside it stands the floor of one row: the bytes that
its weights have, over the rate at which this thread reads memory.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from backends.local.attention import Extent, lay_out
from backends.local.int4 import GROUP, quantise
from backends.local.kv.pool import FP8, KVPool
from backends.local.loading import load_model
from backends.local.models.llama import Llama
from backends.local.precision import WeightPrecision
from backends.local.settings import EngineSettings
from backends.local.weights import Linear
from tests.engines import real_model_path

ROWS = (1, 2, 4, 8, 16, 32)
PROMPT = 256
PAGE = 16
READ_BYTES = 256 << 20
BF16, INT4 = WeightPrecision.BF16, WeightPrecision.INT4

Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--context", type=int, default=200, help="tokens before each decoded one")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = EngineSettings(model_path=real_model_path(), served_model_name="step", decode_weights=INT4)
    native = load_model(settings)
    plain = load_model(EngineSettings(model_path=real_model_path(), served_model_name="step", compiled_kernels=False))
    print(f"kernels: {native.kernels}; context {options.context}; CPU ms of one thread")
    print_steps(native, plain, options)
    print_prompts(native, plain, options.repeats)
    print_products(native, options.repeats)
    print_floor(native, options.repeats)


@torch.inference_mode()
def print_steps(native: Llama, plain: Llama, options: argparse.Namespace) -> None:
    variants: dict[str, Callable[[int], Work]] = {
        "bf16": lambda rows: decode(native, rows, options.context, torch.bfloat16, BF16),
        "fp8 cache": lambda rows: decode(native, rows, options.context, FP8, BF16),
        "int4 decode": lambda rows: decode(native, rows, options.context, torch.bfloat16, INT4),
        "bf16, torch kernels": lambda rows: decode(plain, rows, options.context, torch.bfloat16, BF16),
        "fp8, torch kernels": lambda rows: decode(plain, rows, options.context, FP8, BF16),
    }
    if options.transformers:
        reference = AutoModelForCausalLM.from_pretrained(real_model_path(), dtype=torch.bfloat16)
        variants["transformers"] = lambda rows: decode_transformers(reference, rows, options.context)
    print(f"\n{'decode step, rows':<22}" + "".join(f"{rows:>9}" for rows in ROWS))
    cells = {rows: best({name: make(rows) for name, make in variants.items()}, options.repeats) for rows in ROWS}
    for name in variants:
        print(f"{name:<22}" + "".join(f"{cells[rows][name]:>9.1f}" for rows in ROWS))


@torch.inference_mode()
def print_prompts(native: Llama, plain: Llama, repeats: int) -> None:
    timed = best(
        {
            "bf16": prefill(native, BF16),
            "int4 values, widened": prefill(native, INT4),
            "bf16, torch kernels": prefill(plain, BF16),
        },
        max(2, repeats // 4),
    )
    print(f"\na prompt of {PROMPT} tokens")
    for name, milliseconds in timed.items():
        print(f"{name:<22}{milliseconds:>9.0f} ms, {PROMPT / milliseconds * 1e3:.0f} tok/s")


@torch.inference_mode()
def print_products(model: Llama, repeats: int) -> None:
    """The layers' products alone: where INT4's own kernel stops paying."""
    config = model.config
    shapes = {
        "qkv": ((config.heads + 2 * config.kv_heads) * config.head_size, config.hidden_size),
        "out": (config.hidden_size, config.heads * config.head_size),
        "gate and up": (2 * config.inner_size, config.hidden_size),
        "down": (config.hidden_size, config.inner_size),
    }
    layers = 8
    wide, packed = [], []
    for outputs, columns in list(shapes.values()) * layers:
        quantised = quantise(torch.randn(outputs, columns))
        wide.append(Linear(quantised.widened(torch.bfloat16)))
        levels = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quantised.unpacked().int(), 1)  # noqa: SLF001  it has no public name
        packed.append((levels, torch.stack((quantised.scales.t(), quantised.middles.t()), -1).contiguous(), columns))

    def bf16(rows: int) -> Work:
        given = {columns: torch.randn(rows, columns).bfloat16() for _, columns in shapes.values()}
        return lambda: [one(given[columns]) for one, (_, _, columns) in zip(wide, packed, strict=True)]

    def int4(rows: int) -> Work:
        given = {columns: torch.randn(rows, columns).bfloat16() for _, columns in shapes.values()}
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001  it has no public name
        return lambda: [multiply(given[columns], levels, GROUP, scales) for levels, scales, columns in packed]

    print(f"\nproducts of all layers, rows{'bf16':>9}{'int4':>9}{'ratio':>8}")
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
        timed = best({"bf16": bf16(rows), "int4": int4(rows)}, repeats)
        scale = config.layers / layers
        ratio = timed["bf16"] / timed["int4"]
        print(f"{rows:>28}{scale * timed['bf16']:>9.1f}{scale * timed['int4']:>9.1f}{ratio:>8.2f}")


def print_floor(model: Llama, repeats: int) -> None:
    memory = torch.empty(READ_BYTES // 8, dtype=torch.int64).random_()
    rate = READ_BYTES / best({"read": memory.sum}, repeats)["read"] * 1e-6
    config = model.config
    attention = (config.heads + config.kv_heads) * 2 * config.head_size * config.hidden_size
    layers = config.layers * (attention + 3 * config.inner_size * config.hidden_size)
    head = config.vocabulary * config.hidden_size
    print(f"\nthis thread reads {rate:.1f} GB/s; the floor of one row:")
    for name, size in {"bf16": 2 * (layers + head), "int4 decode": layers * (0.5 + 4 / GROUP) + 2 * head}.items():
        print(f"{name:<22}{size / 1e6:>9.0f} MB{size / rate * 1e-6:>9.1f} ms")


def decode(model: Llama, rows: int, context: int, stored: torch.dtype, precision: WeightPrecision) -> Work:
    numbers = itertools.count()
    pages = [list(itertools.islice(numbers, -(-(context + 1) // PAGE))) for _ in range(rows)]
    pool = _pool(model, next(numbers), stored)
    tokens = torch.arange(100, 100 + rows)

    def step() -> None:
        layout = lay_out([Extent(one, context + 1, 1) for one in pages], [], PAGE, model.config.dtype)
        model.logits(model.forward(tokens, layout, pool, precision)).argmax(-1).tolist()

    return step


def prefill(model: Llama, precision: WeightPrecision) -> Work:
    pool = _pool(model, PROMPT // PAGE, torch.bfloat16)
    layout = lay_out([], [Extent(list(range(PROMPT // PAGE)), PROMPT, PROMPT)], PAGE, model.config.dtype)
    tokens = torch.arange(100, 100 + PROMPT)
    return lambda: model.logits(model.forward(tokens, layout, pool, precision)[-1:])


def decode_transformers(model: Any, rows: int, context: int) -> Work:
    cache = DynamicCache()
    model(torch.full((rows, context), 100), past_key_values=cache, use_cache=True)
    token = torch.full((rows, 1), 100)

    def step() -> None:
        model(token, past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()
        cache.crop(-1)

    return step


def best(works: dict[str, Work], repeats: int) -> dict[str, float]:
    """CPU milliseconds of each, in turn."""
    found = dict.fromkeys(works, float("inf"))
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            began = time.thread_time()
            work()
            found[name] = min(found[name], (time.thread_time() - began) * 1e3)
    return found


def _pool(model: Llama, pages: int, stored: torch.dtype) -> KVPool:
    config = model.config
    return KVPool(
        layers=config.layers, pages=pages, page_size=PAGE, kv_heads=config.kv_heads, head_size=config.head_size,
        dtype=config.dtype, stored=stored,
    )  # fmt: skip


if __name__ == "__main__":
    main()
