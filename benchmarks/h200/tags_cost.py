"""What the page tags cost: the same server with and without the plugin, side by side on two GPUs, then swapped.

    python3 -m benchmarks.h200.tags_cost OUT [--cpu] [--passes 3] [--seconds 390]

Every cell runs on both servers at the same time, in each of two rounds; in the second the GPUs change places. Lines go
to OUT/tags_cost.jsonl as they are measured; the medians are printed at the end.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.h200.load import Cell, Target, measure
from benchmarks.h200.servers import Place, Spec, metric, running

PAGE_TOKENS = 64
WARM = Cell(8, 8, 1024, 16)
CELLS = [Cell(1, 4, 128, 512), Cell(2, 6, 1024, 512), Cell(4, 12, 1024, 512), Cell(8, 24, 1024, 512)]
# The cells with 1, 8 and 32 streams are those of the earlier measurements of this shape: they are the control.
CELLS += [Cell(32, 64, 1024, 1024)]
REHEARSAL = [Cell(1, 1, 64, 8), Cell(4, 4, 64, 8)]


async def main(out: Path, *, cpu: bool, passes: int, seconds: float) -> None:
    place = Place(shapes=out / "shapes", logs=out, cpu=cpu)
    ends = time.monotonic() + seconds
    lines: list[dict[str, Any]] = []
    for turn in (0, 1):
        specs = [_spec(place, gpu, tags=gpu == turn, turn=turn) for gpu in (0, 1)]
        with running(place, specs, ready_s_max=300):
            await _everywhere(place, specs, WARM if not cpu else REHEARSAL[0])
            print(f"round {turn} is up, {ends - time.monotonic():.0f} s left", flush=True)
            for number in range(passes):
                for cell in REHEARSAL if cpu else CELLS:
                    # The second round needs its start, and as many passes as this one has had.
                    if turn == 1 and time.monotonic() > ends:
                        break
                    for line in await _everywhere(place, specs, cell):
                        lines.append(line | {"round": turn, "pass": number})
                        with (out / "tags_cost.jsonl").open("a") as file:
                            file.write(json.dumps(lines[-1]) + "\n")
            for spec in specs:
                checked, aborted = (metric(spec, f"pagegate:page_tags_{what}_total") for what in _WHAT)
                print(f"{spec.name}: {checked:.0f} pages compared, {aborted:.0f} requests stopped", flush=True)
    _print(lines)


_WHAT = ("pairs_checked", "requests_aborted")


def _spec(place: Place, gpu: int, *, tags: bool, turn: int) -> Spec:
    flags = [*place.flags(page_tokens=PAGE_TOKENS), *place.weights("fp8")]
    flags += ["--skip-tokenizer-init", "--incremental-streaming-output"]
    return Spec(f"{'on' if tags else 'off'}-gpu{gpu}-round{turn}", gpu, 31000 + gpu, flags, tags=tags)


async def _everywhere(place: Place, specs: list[Spec], cell: Cell) -> list[dict[str, Any]]:
    """At the same time, so that whatever else the machine does touches both."""
    return await asyncio.gather(
        *[
            measure("on" if spec.tags else "off", cell, [Target(spec.url)], vocabulary=place.vocabulary, routed=False)
            for spec in specs
        ]
    )


def _print(lines: list[dict[str, Any]]) -> None:
    print("| streams | runs | off tokens/s | on tokens/s | on/off | ITL p50 | p95 | p99 (off; on, ms) |")
    for cell in sorted({(line["streams"], line["tokens_in"], line["tokens_out"]) for line in lines}):
        sides = {}
        for label in ("off", "on"):
            of = [
                line
                for line in lines
                if line["label"] == label and (line["streams"], line["tokens_in"], line["tokens_out"]) == cell
            ]
            sides[label] = {key: statistics.median(line[key] for line in of) for key in _MEDIANS}
            sides[label]["runs"] = len(of)
        off, on = sides["off"], sides["on"]
        between = " | ".join(f"{off[key]}; {on[key]}" for key in _MEDIANS[1:])
        ratio = on["tokens_s"] / off["tokens_s"]
        print(f"| {cell} | {on['runs']} | {off['tokens_s']} | {on['tokens_s']} | {ratio:.4f} | {between} |")


_MEDIANS = ("tokens_s", "between_ms_p50", "between_ms_p95", "between_ms_p99")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=390)
    given = parser.parse_args()
    asyncio.run(main(given.out.resolve(), cpu=given.cpu, passes=given.passes, seconds=given.seconds))
