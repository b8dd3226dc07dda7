"""Prints the tables of this folder's README from its raw lines: `python -m benchmarks.h200.tables`."""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_BETWEEN = ("between_ms_p50", "between_ms_p95", "between_ms_p99")
_DEPLOYMENTS = ("pair", "fp8", "int4", "pair-fp8")
Line = dict[str, Any]


def main() -> None:
    _tags_cost()
    for mix in ((1024, 1024), (4096, 256)):
        _pairs(*mix)


def read(pattern: str) -> list[Line]:
    return [json.loads(line) for file in sorted(RESULTS.glob(pattern)) for line in file.read_text().splitlines()]


def median(lines: list[Line], key: str) -> float:
    return statistics.median(float(line[key]) for line in lines)


def _tags_cost() -> None:
    cells: dict[tuple[int, int, int], dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in read("tags_cost*.jsonl"):
        cells[line["streams"], line["tokens_in"], line["tokens_out"]][line["label"]].append(line)
    print("| streams (in/out) | off, tokens/s | on, tokens/s | change | ITL p50 off; on, ms | p95 | p99 |")
    print("|---|---|---|---|---|---|---|")
    for (streams, tokens_in, tokens_out), sides in sorted(cells.items()):
        off, on = sides["off"], sides["on"]
        # Each pass ran on both servers at the same time: the change is the median over passes of their ratio.
        ratios = [there["tokens_s"] / here["tokens_s"] for here, there in zip(off, on, strict=True)]
        change = 100 * (statistics.median(ratios) - 1)
        rates = f"{median(off, 'tokens_s'):,.1f} | {median(on, 'tokens_s'):,.1f} | {change:+.1f} %"
        between = " | ".join(f"{median(off, key):.2f}; {median(on, key):.2f}" for key in _BETWEEN)
        print(f"| {streams} ({tokens_in}/{tokens_out}) | {rates} | {between} |")


def _pairs(tokens_in: int, tokens_out: int) -> None:
    cells: dict[int, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in read("pairs*.jsonl"):
        if (line["tokens_in"], line["tokens_out"]) == (tokens_in, tokens_out):
            cells[line["streams"]][line["label"]].append(line)
    print(f"\n{tokens_in} in, {tokens_out} out: tokens/s; first token p50 / p95, ms; between tokens p50 / p95, ms")
    print("| streams | " + " | ".join(_DEPLOYMENTS) + " |")
    print("|---|" + "---|" * len(_DEPLOYMENTS))
    for streams, by in sorted(cells.items()):
        print(f"| {streams} | " + " | ".join(_figures(by[name]) if by[name] else "" for name in _DEPLOYMENTS) + " |")


def _figures(lines: list[Line]) -> str:
    first = f"{median(lines, 'first_ms_p50'):,.0f} / {median(lines, 'first_ms_p95'):,.0f}"
    between = f"{median(lines, 'between_ms_p50'):.2f} / {median(lines, 'between_ms_p95'):.2f}"
    return f"{median(lines, 'tokens_s'):,.0f}; {first}; {between}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
