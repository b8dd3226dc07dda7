"""Pages that are freed under running requests: is each caught before its token leaves, and do all others go on?

    python3 -m benchmarks.h200.tags_faults OUT [--cpu] [--pages 64,1] [--tensor-parallel 2]

Three runs of the same requests, all at once, greedy, on a server with page tags, overlap scheduling and CUDA graphs:
two clean ones, and one in which a page is freed under every fourth request at its third token, so that somebody else is
given it. One server for each page size, side by side on GPUs of their own. Lines go to OUT/tags_faults.jsonl.
"""

import argparse
import asyncio
import json
import random
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.h200.load import generate
from benchmarks.h200.servers import Place, Spec, flush, metric, running

# What the plugin looks for at the beginning of an id (backends/sglang/plugin.py).
_FAULT = "fault-"
_FAULT_AT_TOKEN = 3
EVERY = 4


@dataclass
class Answer:
    """What a client has seen: tokens, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    ended: dict[str, Any] | None = None
    error: str | None = None


async def main(out: Path, *, cpu: bool, page_sizes: list[int], ranks: int) -> None:
    place = Place(shapes=out / "shapes", logs=out, cpu=cpu)
    specs = [_spec(place, number, page_tokens, ranks) for number, page_tokens in enumerate(page_sizes)]
    with running(place, specs, ready_s_max=300):
        for line in await asyncio.gather(
            *[_judge(place, spec, page) for spec, page in zip(specs, page_sizes, strict=True)]
        ):
            print(json.dumps(line), flush=True)
            with (out / "tags_faults.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def _spec(place: Place, gpu: int, page_tokens: int, ranks: int) -> Spec:
    flags = [*place.flags(page_tokens=page_tokens), *place.weights("fp8")]
    flags += ["--skip-tokenizer-init", "--incremental-streaming-output"]
    if ranks > 1:
        flags += ["--tp-size", str(ranks), "--disable-custom-all-reduce"]
    environment = {"PAGEGATE_PAGE_TAGS_FAULT": _FAULT}
    return Spec(f"faults-page{page_tokens}", gpu, 31000 + gpu, flags, tags=True, environment=environment)


async def _judge(place: Place, spec: Spec, page_tokens: int) -> dict[str, Any]:
    drawn = random.Random(5)
    count, tokens = (16, 24) if place.cpu else (64, 300)
    prompts = [
        [drawn.randrange(1000, place.vocabulary) for _ in range(drawn.randrange(30, 90 if place.cpu else 900))]
        for _ in range(count)
    ]
    victims = set(range(0, count, EVERY))
    clean = await _run(spec, prompts, tokens, set())
    again = await _run(spec, prompts, tokens, set())
    faulty = await _run(spec, prompts, tokens, victims)
    after = await _run(spec, prompts, tokens, set())
    others = [number for number in range(count) if number not in victims]
    caught = [number for number in victims if _is_stopped(faulty[number])]
    return {
        "page_tokens": page_tokens,
        "requests": count,
        "tokens_out": tokens,
        "injected": len(victims),
        "caught": len(caught),
        # The token of the pass before it was on its way when the page was freed, and is right.
        "tokens_seen_at_most": max(len(faulty[number].tokens) for number in victims),
        "victims_with_other_tokens_than_clean": sum(
            not _begins(clean[n], faulty[n]) and not _begins(again[n], faulty[n]) for n in victims
        ),
        "others": len(others),
        "others_ended_well": sum(_is_whole(faulty[number], tokens) for number in others),
        "others_unlike_clean": sum(faulty[number].tokens != clean[number].tokens for number in others),
        "clean_unlike_clean": sum(again[number].tokens != clean[number].tokens for number in others),
        "others_in_one_of_two_clean": sum(
            faulty[number].tokens in (clean[number].tokens, again[number].tokens) for number in others
        ),
        "after_ended_well": sum(_is_whole(answer, tokens) for answer in after),
        "clean_ended_well": sum(_is_whole(answer, tokens) for answer in (*clean, *again)),
        "stopped_by_metric": metric(spec, "pagegate:page_tags_requests_aborted_total"),
        "quarantined_by_metric": metric(spec, "pagegate:page_tags_pages_quarantined"),
        "pairs_checked": metric(spec, "pagegate:page_tags_pairs_checked_total"),
        "victims_said": sorted({str((faulty[n].ended or {}).get("message") or faulty[n].error)[:90] for n in victims}),
    }


async def _run(spec: Spec, prompts: list[list[int]], tokens: int, victims: set[int]) -> list[Answer]:
    flush(spec)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20) as session:
        return await asyncio.gather(
            *[_one(session, spec, prompt, tokens, is_victim=number in victims) for number, prompt in enumerate(prompts)]
        )


async def _one(
    session: aiohttp.ClientSession, spec: Spec, prompt: list[int], tokens: int, *, is_victim: bool
) -> Answer:
    answer = Answer()
    rid = (_FAULT if is_victim else "sound-") + uuid.uuid4().hex
    try:
        async for _, event in generate(session, spec.url, prompt, tokens, rid=rid):
            answer.tokens += event["output_ids"]
            answer.ended = event["meta_info"].get("finish_reason") or answer.ended
    except (RuntimeError, aiohttp.ClientError) as error:
        answer.error = str(error)
    return answer


def _is_stopped(answer: Answer) -> bool:
    said = str(answer.ended) + str(answer.error)
    return "changed hands" in said and len(answer.tokens) <= _FAULT_AT_TOKEN + 1


def _is_whole(answer: Answer, tokens: int) -> bool:
    return answer.error is None and len(answer.tokens) == tokens


def _begins(whole: Answer, part: Answer) -> bool:
    return whole.tokens[: len(part.tokens)] == part.tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--pages", default="64,1")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="one server over as many GPUs")
    given = parser.parse_args()
    sizes = [int(size) for size in given.pages.split(",")]
    asyncio.run(main(given.out.resolve(), cpu=given.cpu, page_sizes=sizes, ranks=given.tensor_parallel))
