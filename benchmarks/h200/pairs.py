"""A prefill/decode pair with FP8 prefill and INT4 decode against two FP8 and two INT4 servers, on the same two GPUs.

    python3 -m benchmarks.h200.pairs OUT DEPLOYMENT... [--cpu] [--transfer nixl] [--seconds 280] [--streams 1,8,16]
        [--tokens-a-chunk 1]

DEPLOYMENT: pair, pair-fp8 (its decode half has FP8 weights too), fp8 or int4. FP8 KV, page 64, page tags on, and the
gateway's own calls in front (routed.py). Lines go to OUT/pairs.jsonl as they are measured.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

from benchmarks.h200.load import Cell, Target, measure
from benchmarks.h200.servers import Place, Spec, metric, running

PAGE_TOKENS = 64
STREAMS = "1,8,16,32,64,128"
BOOTSTRAP = 8998
_MODEL = "benchmark"
# Connections are made and kernels compiled in it; a transfer that doesn't work shows here.
_WARM_S = 90


def cells(streams: list[int], *, cpu: bool) -> list[Cell]:
    """Mixes 4k/256 and 1k/1k; the requests are as many as give a median without taking the time of the others."""
    if cpu:
        return [Cell(1, 1, 64, 8), Cell(4, 6, 64, 8)]
    prompts = [Cell(many, max(3, 2 * many), 4096, 256) for many in streams]
    outputs = [Cell(many, max(2, many + many // 2), 1024, 1024) for many in streams]
    # Both mixes side by side: if the time is short, those with the most streams are left out of both.
    return [cell for both in zip(outputs, prompts, strict=True) for cell in both]


async def main(
    out: Path, deployments: list[str], streams: list[int], *, cpu: bool, transfer: str, seconds: float, chunk: int
) -> None:
    place = Place(shapes=out / "shapes", logs=out, cpu=cpu)
    for deployment in deployments:
        specs, targets = _deployed(place, deployment, transfer, chunk)
        ends = time.monotonic() + seconds
        with running(place, specs, ready_s_max=300):
            print(f"{deployment} is up, {ends - time.monotonic():.0f} s left", flush=True)
            warm = Cell(8, 16, 1024, 16) if not cpu else Cell(1, 1, 32, 4)
            async with asyncio.timeout(_WARM_S):
                warmed = await measure("warm", warm, targets, vocabulary=place.vocabulary, routed=True, model=_MODEL)
            print(warmed, flush=True)
            if warmed["errors"]:
                raise RuntimeError(f"{deployment} does not work")
            for cell in cells(streams, cpu=cpu):
                if time.monotonic() > ends:
                    print(f"no time for {cell}", flush=True)
                    continue
                line = await measure(deployment, cell, targets, vocabulary=place.vocabulary, routed=True, model=_MODEL)
                line |= {
                    "tag_mismatches": sum(metric(spec, "pagegate:page_tags_requests_aborted_total") for spec in specs),
                    "tags_active": sum(metric(spec, "pagegate:page_tags_active") for spec in specs),
                    "retracted": sum(metric(spec, "sglang:num_retracted_requests_total") for spec in specs),
                    "transfer": transfer if deployment.startswith("pair") else None,
                    "tokens_a_chunk": chunk,
                }
                print(json.dumps(line), flush=True)
                with (out / "pairs.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")


def _deployed(place: Place, deployment: str, transfer: str, chunk: int) -> tuple[list[Spec], list[Target]]:
    common = [*place.flags(page_tokens=PAGE_TOKENS if not place.cpu else 16), "--served-model-name", _MODEL]
    common += ["--stream-interval", str(chunk)]
    if not deployment.startswith("pair"):
        flags = [*common, *place.weights(deployment)]
        alone = [Spec(f"{deployment}-gpu{gpu}", gpu, 31000 + gpu, flags, tags=True) for gpu in (0, 1)]
        return alone, [Target(spec.url) for spec in alone]
    both = ["--disaggregation-transfer-backend", transfer, "--disaggregation-bootstrap-port", str(BOOTSTRAP)]
    prefill = ["--disaggregation-mode", "prefill", *place.weights("fp8")]
    decode = ["--disaggregation-mode", "decode", *place.weights("int4" if deployment == "pair" else "fp8")]
    if place.cpu:
        prefill += ["--disable-overlap-schedule"]
        decode += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    halves = [
        Spec("pair-prefill", 0, 31000, [*common, *both, *prefill], tags=True),
        Spec("pair-decode", 1, 31001, [*common, *both, *decode], tags=True),
    ]
    return halves, [Target(halves[1].url, prefill=halves[0].url, bootstrap=BOOTSTRAP)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("deployments", nargs="+", choices=["pair", "pair-fp8", "fp8", "int4"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--transfer", default="nixl")
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--streams", default=STREAMS)
    parser.add_argument("--tokens-a-chunk", type=int, default=1)
    given = parser.parse_args()
    asyncio.run(
        main(
            given.out.resolve(),
            given.deployments,
            [int(many) for many in given.streams.split(",")],
            cpu=given.cpu,
            transfer=given.transfer,
            seconds=given.seconds,
            chunk=given.tokens_a_chunk,
        )
    )
