"""What checking page tags costs the local engine: the check's own time in a step, and steps with it on and off.

    .venv/bin/python -m benchmarks.tag_check [--rounds 9] [--prompt 200] [--tokens 64] [--streams 1 2 4 8]

Two engines over the same weights in this process, one that checks and one that does not; a round runs the same streams
on each, in turns whose order alternates, so that what else the machine does hits both. Printed are medians over the
rounds, with the least and the greatest. The check's own time is that of one check of as many sequences with as many
pages, the median of many.
"""

import argparse
import time
from dataclasses import dataclass, field
from statistics import median

from backends.local.detokenizer import TextStream
from backends.local.engine import Engine
from backends.local.loading import load_model
from backends.local.sequence import SamplingParams, Sequence
from backends.local.settings import EngineSettings
from backends.page_tags.check import StepCheck
from backends.page_tags.table import TagTable
from tests.engines import real_model_path

VOCABULARY = 40_000
CHECKS = 2_000


@dataclass(slots=True)
class Cell:
    """One entry a round."""

    tokens_per_second: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p95_ms: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens a stream")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    options = parser.parse_args()
    settings = {tags: _settings(page_tags=tags) for tags in (True, False)}
    model = load_model(settings[True])
    engines = {tags: Engine(model, settings[tags], time.monotonic) for tags in (True, False)}
    for engine in engines.values():
        engine.warm_up()
        _run(engine, 1, options.prompt, options.tokens)
    print(f"prompts of {options.prompt}, outputs of {options.tokens}, pages of 16; median (least … greatest)")
    for streams in options.streams:
        cells = {True: Cell(), False: Cell()}
        for number in range(options.rounds):
            for tags in (True, False) if number % 2 == 0 else (False, True):
                _add(cells[tags], streams, _run(engines[tags], streams, options.prompt, options.tokens))
        own_us = _own_microseconds(streams, (options.prompt + options.tokens) // 16 + 1)
        _print(streams, cells, own_us)


def _settings(*, page_tags: bool) -> EngineSettings:
    return EngineSettings(
        model_path=real_model_path(), served_model_name="tags", page_tags=page_tags, disable_radix_cache=True,
        kv_cache_bytes=256 << 20,
    )  # fmt: skip


def _run(engine: Engine, streams: int, prompt: int, tokens: int) -> list[float]:
    """Seconds of each step in which all streams decoded."""
    for number in range(streams):
        engine.submit(
            Sequence(
                rid=str(number),
                prompt_tokens=prompt,
                tokens=[(number * 7919 + at * 31) % VOCABULARY + 100 for at in range(prompt)],
                max_new_tokens=tokens,
                sampling=SamplingParams(temperature=0.0),
                text=TextStream([]),
            )
        )
    steps = []
    decoding = False
    while not engine.idle:
        began = time.perf_counter()
        produced = len(engine.step())
        if decoding:
            steps.append(time.perf_counter() - began)
        decoding = produced == streams
    return steps


def _add(cell: Cell, streams: int, steps: list[float]) -> None:
    ordered = sorted(steps)
    cell.tokens_per_second.append(streams * len(steps) / sum(steps))
    cell.p50_ms.append(1e3 * median(ordered))
    cell.p95_ms.append(1e3 * ordered[int(0.95 * len(ordered))])


def _own_microseconds(streams: int, pages: int) -> float:
    """Of one check of so many sequences with so many pages each; the first ones warm up and do not count."""
    table = TagTable(streams * pages)
    check = StepCheck(table)
    sequences = []
    for number in range(streams):
        sequence = Sequence(
            rid=str(number),
            prompt_tokens=1,
            tokens=[0],
            max_new_tokens=1,
            sampling=SamplingParams(),
            text=TextStream([]),
        )
        sequence.pages = list(range(number * pages, (number + 1) * pages))
        sequence.tags = table.allocate(sequence.pages)
        sequences.append(sequence)
    times = []
    for _ in range(CHECKS):
        began = time.perf_counter()
        assert not check.stale_pages([sequence.claim(pages) for sequence in sequences])
        times.append(time.perf_counter() - began)
    return 1e6 * median(times[CHECKS // 10 :])


def _print(streams: int, cells: dict[bool, Cell], own_us: float) -> None:
    on, off = cells[True], cells[False]
    share = own_us / 1e3 / median(on.p50_ms)
    print(f"{streams} streams: the check takes {own_us:.1f} us of a step of {median(on.p50_ms):.1f} ms, {share:.3%}")
    for name, cell in (("on", on), ("off", off)):
        print(
            f"  {name:<4} {_spread(cell.tokens_per_second)} tok/s   step p50 {_spread(cell.p50_ms)} ms"
            f"   p95 {_spread(cell.p95_ms)} ms"
        )
    ratios = [one / other for one, other in zip(on.tokens_per_second, off.tokens_per_second, strict=True)]
    print(f"  on / off, by round: {_spread(ratios)}", flush=True)


def _spread(values: list[float]) -> str:
    digits = 3 if max(values) < 3 else 1
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
