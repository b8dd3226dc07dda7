"""Does the forecast govern SGLang? A public trace, scaled down, through our gateway to real SGLang on the CPU.

    .venv/bin/python -m benchmarks.sglang_trace TRACE [--minutes 10] [--engines launched default derated] [--factor 2]

One SGLang after the other, each with the same arrivals and a gateway of its own. launched: as `pagegate engine up`
starts it. default: with SGLang's own clip of 4,096 tokens and its whole reserve, of which the gateway is not told.
derated: the same, and the gateway is told. The model is a tiny random one: what counts is SGLang's scheduler before it.

Lengths are divided (--prompts-by, --outputs-by); blocks that the trace says are shared have the same tokens. Nobody
says how long an answer will be: each may have 1,024 tokens and ends by chance, with the trace's length as the mean.
"""

import argparse
import asyncio
import math
import random
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gateway.replay.traces import TraceRow, read_trace
from tests.doubles.waiting import eventually
from tests.e2e.process import START_S_MAX, ServeProcess, serve_process
from tests.engines import IM_END, build_tiny_checkpoint
from tests.sglang_cpu.server import start_sglang

BLOCK_TOKENS = 512  # of the trace
OUTPUT_TOKENS_MAX = 1024
VOCABULARY = 362  # of the tiny model's tokenizer
CONTEXT_TOKENS = 8192
POOL_TOKENS = 16_384
RUNNING_MAX = 64
OUR_CLIP, SGLANGS_CLIP = 256, 4096
# What all other tokens of the tiny model weigh together against the one that ends an answer, about.
OTHER_TOKENS_WEIGHT = 1000.0
DRAIN_S_MAX = 60.0
REPORT_S = 5.0  # by then the engine has reported that nothing runs
HEAD = (
    "| engine | admitted | queued in the engine | retracted | drift left | finished | not served | cut | tokens/s "
    "| TTFT p50, s | p95 |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
ENGINES: dict[str, tuple[dict[str, Any], int]] = {
    "launched": ({}, OUR_CLIP),
    "default": ({"reserved_output_tokens_max": SGLANGS_CLIP, "schedule_conservativeness": 1.0}, OUR_CLIP),
    "derated": ({"reserved_output_tokens_max": SGLANGS_CLIP, "schedule_conservativeness": 1.0}, SGLANGS_CLIP),
}


@dataclass(frozen=True)
class Mix:
    """How a trace's rows become requests. vocabulary: ids of prompts are below it. end: the token that ends an answer.

    others_weight: what all other tokens of the model weigh together against that one, about.
    """

    prompts_by: int
    outputs_by: int
    vocabulary: int = VOCABULARY
    context_tokens: int = CONTEXT_TOKENS
    output_tokens_max: int = OUTPUT_TOKENS_MAX
    end: int = IM_END
    others_weight: float = OTHER_TOKENS_WEIGHT


@dataclass
class Played:
    """What clients saw. first_s: of streams that began."""

    statuses: Counter[int] = field(default_factory=Counter)
    cut: int = 0
    first_s: list[float] = field(default_factory=list)
    produced: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["launched", "default"])
    parser.add_argument("--factor", type=float, default=1.0, help="arrivals come so many times as fast")
    parser.add_argument("--prompts-by", type=int, default=16)
    parser.add_argument("--outputs-by", type=int, default=4)
    chosen = parser.parse_args()
    mix = Mix(chosen.prompts_by, chosen.outputs_by)
    requests = requests_of(chosen.trace, mix, seconds=chosen.minutes * 60, factor=chosen.factor)
    print(f"{len(requests)} requests in {chosen.minutes:g} min, {chosen.factor:g} x as fast; "
          f"prompts / {chosen.prompts_by}, outputs / {chosen.outputs_by}; a pool of {POOL_TOKENS} tokens")  # fmt: skip
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_tiny_checkpoint(Path(folder) / "tiny", max_position_embeddings=CONTEXT_TOKENS)
        for name in chosen.engines:
            launch, told = ENGINES[name]
            sizes = {"total_tokens_max": POOL_TOKENS, "running_requests_max": RUNNING_MAX}
            with (
                start_sglang(checkpoint, threads=1, launch=sizes | launch, context_tokens=CONTEXT_TOKENS) as server,
                serve_process(
                    Path(folder) / name,
                    checkpoint,
                    PAGEGATE_ENGINE__URL=server.url,
                    PAGEGATE_GATEWAY__ENGINE_RESERVED_TOKENS=str(told),
                    PAGEGATE_MODEL_ID="contract",
                ) as gateway,
            ):
                asyncio.run(measure(name, server.url, gateway, requests))


def requests_of(trace: Path, mix: Mix, *, seconds: float, factor: float) -> list[tuple[float, dict[str, Any]]]:
    """The second at which each of a trace's first requests comes, and its body. factor: they come so much faster."""
    rows = [row for row in read_trace(trace) if row.at_s / factor < seconds]
    return [(row.at_s / factor, body_of(row, number, mix)) for number, row in enumerate(rows)]


async def measure(
    name: str, engine_url: str, gateway: ServeProcess, requests: list[tuple[float, dict[str, Any]]]
) -> None:
    """One engine's line of the table."""
    await eventually(gateway.is_ready, within_s=START_S_MAX, what="a ready gateway")
    began = time.monotonic()
    played = await play(gateway, requests)
    took_s = time.monotonic() - began
    drift = await drained(gateway)
    admitted, queued = (
        metric(gateway.base_url, f"pagegate_admitted{part}_total") for part in ("", "_but_engine_queued")
    )
    retracted = metric(engine_url, "sglang:num_retracted_requests_total")
    others = ", ".join(f"{count} x {status}" for status, count in played.statuses.items() if status != 200) or "0"
    first = statistics.quantiles(played.first_s, n=20)
    print(
        f"| {name} | {admitted:.0f} | {queued:.0f} ({queued / admitted:.1%}) | {retracted:.0f} | {drift:.0f} "
        f"| {played.statuses[200] - played.cut} | {others} | {played.cut} | {played.produced / took_s:.0f} "
        f"| {first[9]:.2f} | {first[18]:.2f} |",
        flush=True,
    )


async def play(gateway: ServeProcess, requests: list[tuple[float, dict[str, Any]]]) -> Played:
    base, played = gateway.bootstrap(), Played()
    headers = {"authorization": f"Bearer {base['api_key']}", "content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(gateway.base_url, headers=headers, connector=connector) as session:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at_s, body in requests:
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                group.create_task(ask(session, body, played), name="a client")
    return played


def body_of(row: TraceRow, number: int, mix: Mix) -> dict[str, Any]:
    block = BLOCK_TOKENS // mix.prompts_by
    prompt: list[int] = []
    for hashed in row.blocks:
        drawn = random.Random(hashed)
        prompt += [drawn.randrange(3, mix.vocabulary) for _ in range(block)]
    own = random.Random(-1 - number)
    left = max(1, row.prompt_tokens // mix.prompts_by - len(prompt))
    prompt += [own.randrange(3, mix.vocabulary) for _ in range(left)]
    mean = max(2.0, row.output_tokens / mix.outputs_by)
    return {
        "model": "contract",
        "prompt": prompt[: mix.context_tokens - mix.output_tokens_max],
        "max_tokens": mix.output_tokens_max,
        "temperature": 1,
        "seed": number,
        "logit_bias": {str(mix.end): round(math.log(mix.others_weight / (mean - 1)), 2)},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(session: aiohttp.ClientSession, body: dict[str, Any], played: Played) -> None:
    began, ended = time.monotonic(), False
    async with session.post("/v1/completions", data=orjson.dumps(body)) as response:
        played.statuses[response.status] += 1
        if response.status != 200:
            said = await response.read()
            if played.statuses[response.status] == 1:
                print(f"<!-- {response.status}: {said.decode()[:300]} -->", flush=True)
            return
        first = True
        async for line in response.content:
            if line.startswith(b"data: {") and first:
                first = False
                played.first_s.append(time.monotonic() - began)
            if b'"usage":{' in line:
                played.produced += orjson.loads(line[6:])["usage"]["completion_tokens"]
            ended = ended or line.startswith(b"data: [DONE]")
    played.cut += not ended


async def drained(gateway: ServeProcess) -> float:
    """The drift of the ledger, in tokens, once nothing runs any more and a report has said so."""
    url = gateway.base_url
    await eventually(lambda: not metric(url, "pagegate_live_requests"), within_s=DRAIN_S_MAX, what="an idle gateway")
    await asyncio.sleep(REPORT_S)
    return metric(url, "kv_ledger_drift_tokens")


def metric(url: str, name: str) -> float:
    """Summed over its labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)


if __name__ == "__main__":
    main()
