"""Readers of public traces, plain or gzip: Azure's CSV and Mooncake's JSON lines. Used by the command line.

A reader keeps times and sizes; load and tenants are laid over them by `arrange`, which is deterministic by its seed.
"""

import csv
import gzip
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from gateway.prefixes import BLOCK_TOKENS
from gateway.replay.profiles import Profile
from gateway.replay.requests import SimulatedRequest

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceInvalid(Exception):
    """The trace can't be read: no such file, or not one of the formats."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """at_s: since the trace began."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """How a trace is played.

    factor: arrivals come so many times as fast. tenants: their number; the k-th has a share of 1 / k^skew. greedy: so
    many copies of the first tenant's requests beside the original ones, spread over the whole trace. returning: the
    part of clients that come again, once, when a refusal says so; they show how honest it was.
    """

    factor: float = 1.0
    tenants: int = 20
    skew: float = 1.0
    greedy: int = 0
    returning: float = 0.1
    seed: int = 1


def read_trace(path: Path) -> list[TraceRow]:
    """The format is told from the first line. Raises TraceInvalid."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            first = next(lines, "")
            rows = list(_mooncake(first, lines) if first.lstrip().startswith("{") else _azure(first, lines))
    except OSError as error:
        raise TraceInvalid(f"The trace {path} can't be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise TraceInvalid(
            f"The trace {path} is neither Azure's CSV ({','.join(_AZURE_COLUMNS)}) nor Mooncake's JSON lines: {error}."
        ) from error
    if not rows:
        raise TraceInvalid(f"The trace {path} holds no requests.")
    for number, row in enumerate(rows, start=1):
        if min(row.prompt_tokens, row.output_tokens) < 0 or not math.isfinite(row.at_s):
            raise TraceInvalid(f"The trace {path} holds no time or no number of tokens in its request {number}.")
    rows.sort(key=lambda row: row.at_s)
    return rows


def _azure(first: str, lines: Iterable[str]) -> Iterator[TraceRow]:
    names = [name.strip() for name in first.split(",")]
    start: datetime | None = None
    for line in csv.DictReader(lines, fieldnames=names):
        # Seven digits of a second, one more than Python reads; newer files end in a zone, which is left out.
        at = datetime.fromisoformat(line["TIMESTAMP"][:26])
        start = start or at
        yield TraceRow((at - start).total_seconds(), int(line["ContextTokens"]), int(line["GeneratedTokens"]))


def _mooncake(first: str, lines: Iterable[str]) -> Iterator[TraceRow]:
    for line in (first, *lines):
        if line.strip():
            row: dict[str, Any] = json.loads(line)
            prompt = int(row["input_length"])
            blocks = tuple(int(block) for block in row.get("hash_ids", ()))[: prompt // BLOCK_TOKENS]
            yield TraceRow(float(row["timestamp"]) / 1000, prompt, int(row["output_length"]), blocks)


def arrange(rows: list[TraceRow], load: Load, profile: Profile) -> list[SimulatedRequest]:
    """The trace's requests at a load, as tenants' requests to one replica. What can never fit is left out."""
    draw = random.Random(load.seed)  # noqa: S311 - reproducible, not secret
    names = [f"tenant-{number}" for number in range(load.tenants)]
    weights = list(accumulate(1 / (number + 1) ** load.skew for number in range(load.tenants)))
    timed = [(row.at_s / load.factor, draw.choices(names, cum_weights=weights)[0], row) for row in rows]
    greedy = [row for _, tenant, row in timed if tenant == names[0]] * load.greedy
    timed += [(draw.random() * timed[-1][0], names[0], row) for row in greedy]
    timed.sort(key=lambda item: item[0])
    requests = []
    for number, (at_s, tenant, row) in enumerate(timed):
        room = min(profile.context_tokens, profile.total_tokens) - row.prompt_tokens - profile.page_tokens
        ceiling = min(profile.output_tokens_max, room)
        if ceiling >= 1:
            output = max(1, min(row.output_tokens, ceiling))
            requests.append(
                SimulatedRequest(f"r{number}", tenant, at_s, max(1, row.prompt_tokens), output, ceiling, row.blocks)
            )
    for request in requests:
        request.returns = draw.random() < load.returning
    return requests
