"""Does the forecast govern SGLang on a GPU? A public trace at full size, through the whole service.

    python3 -m benchmarks.h200.trace OUT TRACE [--seconds 240] [--factor 1] [--gateway-path FOLDERS] [--cpu]

Two servers with FP8 weights, an FP8 cache and pages of 64, one a GPU, side by side, each with a `pagegate serve` of its
own and the same arrivals (../sglang_trace.py). launched: with the clip and the conservativeness of
`pagegate engine up`. default: with SGLang's own, of which its gateway is not told. --gateway-path: PYTHONPATH of the
gateways, where the server's environment has other versions. --cpu: a rehearsal, with prompts and outputs a sixteenth.
"""

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.h200.servers import Place, Spec, running
from benchmarks.h200.shapes import SHAPES, write_shape
from benchmarks.sglang_trace import HEAD, OUR_CLIP, SGLANGS_CLIP, Mix, measure, requests_of
from tests.e2e.process import ServeProcess, serve_process

PAGE_TOKENS = 64
CONTEXT_TOKENS = 131_072
RUNNING_MAX = 128
_SERVERS = {"launched": (OUR_CLIP, 0.3), "default": (SGLANGS_CLIP, 1.0)}


def mix_of(*, cpu: bool) -> Mix:
    """Dummy weights give all tokens nearly the same logit, so the others weigh as many as there are."""
    shape: dict[str, Any] = SHAPES["tiny" if cpu else "8b"]
    words = shape["vocab_size"]
    by, context, output = (16, 8192, 512) if cpu else (1, CONTEXT_TOKENS, 4096)
    return Mix(by, by, words - 300, context, output, end=shape["eos_token_id"], others_weight=words)


def specs_of(place: Place) -> list[Spec]:
    specs = []
    for gpu, (name, (clip, conservativeness)) in enumerate(_SERVERS.items()):
        flags = [
            *place.flags(page_tokens=PAGE_TOKENS),
            *place.weights("fp8"),
            *("--served-model-name", "contract", "--schedule-conservativeness", str(conservativeness)),
        ]
        if not place.cpu:
            flags += ["--max-running-requests", str(RUNNING_MAX)]
        environment = {
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(clip),
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        }
        specs.append(Spec(name, gpu, 31_000 + gpu, flags, environment=environment))
    return specs


async def main(out: Path, trace: Path, *, seconds: float, factor: float, path: str, cpu: bool) -> None:
    place, mix = Place(shapes=out / "shapes", logs=out, cpu=cpu), mix_of(cpu=cpu)
    specs = specs_of(place)
    requests = requests_of(trace, mix, seconds=seconds, factor=factor)
    prompts = sum(len(body["prompt"]) for _, body in requests)
    print(f"{len(requests)} requests with {prompts} prompt tokens in {seconds:g} s, {factor:g} x as fast", flush=True)
    checkpoint = write_shape("tiny" if cpu else "8b", place.shapes)
    with running(place, specs, ready_s_max=200), contextlib.ExitStack() as stack:
        gateways = [stack.enter_context(_gateway(spec, checkpoint, out, path)) for spec in specs]
        print(HEAD, flush=True)
        await asyncio.gather(
            *(measure(spec.name, spec.url, gateway, requests) for spec, gateway in zip(specs, gateways, strict=True))
        )


def _gateway(spec: Spec, checkpoint: Path, out: Path, path: str) -> contextlib.AbstractContextManager[ServeProcess]:
    return serve_process(
        out / f"gateway-{spec.name}",
        checkpoint,
        PAGEGATE_ENGINE__URL=spec.url,
        PAGEGATE_GATEWAY__ENGINE_RESERVED_TOKENS=str(OUR_CLIP),
        PAGEGATE_MODEL_ID="contract",
        PYTHONPATH=path,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--gateway-path", default=":".join(sys.path[1:]))
    parser.add_argument("--cpu", action="store_true")
    chosen = parser.parse_args()
    asyncio.run(
        main(
            chosen.out.resolve(),
            chosen.trace,
            seconds=chosen.seconds,
            factor=chosen.factor,
            path=chosen.gateway_path,
            cpu=chosen.cpu,
        )
    )
