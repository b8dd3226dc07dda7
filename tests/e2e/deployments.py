"""Deployment files of scripted engines: replicas and pairs by their URLs, written where a gateway reads them."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.doubles.engine import ScriptedEngine
from tests.doubles.rooms import Rooms

MODEL = "@cf/test/deployed"


@dataclass(frozen=True)
class ScriptedPair:
    """Two scripted engines that hand pages over."""

    prefill: ScriptedEngine
    decode: ScriptedEngine
    rooms: Rooms


@contextlib.asynccontextmanager
async def scripted_pair(*, prefill_ranks: int = 1, **decode: Any) -> AsyncIterator[ScriptedPair]:
    """The fields change the decode half alone."""
    rooms = Rooms()
    async with (
        ScriptedEngine(role="prefill", rooms=rooms, ranks=prefill_ranks) as prefill,
        ScriptedEngine(role="decode", rooms=rooms, **decode) as generating,
    ):
        yield ScriptedPair(prefill, generating, rooms)


@dataclass(frozen=True)
class ScriptedGroup:
    """Scripted halves of which any hands pages over to any."""

    prefill: list[ScriptedEngine]
    decode: list[ScriptedEngine]
    rooms: Rooms

    @property
    def engines(self) -> list[ScriptedEngine]:
        return [*self.prefill, *self.decode]

    def table(self, *, prefill: int | None = None, decode: int | None = None) -> dict[str, Any]:
        """As a deployment file has it, its halves named p0, p1, … and d0, d1, …; or the first so many of each."""
        weights = {"checkpoint": "/weights", "precision": "bf16"}
        return {
            "prefill": [
                {"name": f"p{number}", "url": one.url, "bootstrap_port": 8998 + number, "weights": weights}
                for number, one in enumerate(self.prefill[:prefill])
            ],
            "decode": [
                {"name": f"d{number}", "url": one.url, "weights": weights}
                for number, one in enumerate(self.decode[:decode])
            ],
        }


@contextlib.asynccontextmanager
async def scripted_group(prefill: int = 2, decode: int = 2, **fields: Any) -> AsyncIterator[ScriptedGroup]:
    """So many of each half. The fields change the decode halves alone."""
    rooms = Rooms()
    async with contextlib.AsyncExitStack() as stack:
        prompts = [ScriptedEngine(role="prefill", rooms=rooms) for _ in range(prefill)]
        decodes = [ScriptedEngine(role="decode", rooms=rooms, **fields) for _ in range(decode)]
        for engine in (*prompts, *decodes):
            await stack.enter_async_context(engine)
        yield ScriptedGroup(prompts, decodes, rooms)


def write_deployment(path: Path, *models: dict[str, Any]) -> Path:
    path.write_text("\n".join(_toml("models", model) for model in models))
    return path


def model(
    checkpoint: Path,
    *,
    replicas: Sequence[ScriptedEngine | dict[str, Any]] = (),
    pairs: Sequence[ScriptedPair] = (),
    groups: Sequence[dict[str, Any]] = (),
    **fields: Any,
) -> dict[str, Any]:
    """One model of the file: replicas are named r0, r1, … and pairs p0, p1, …"""
    weights = {"checkpoint": "/weights", "precision": "bf16"}
    return {
        "id": MODEL,
        "price": "some-price",
        "tokenizer": str(checkpoint),
        "limits": {"context_tokens": 2048, "output_tokens_max": 2047},
        "kv_cache_dtype": "bf16",
        "page_tokens": 16,
        "page_tags": False,
        "replicas": [
            {"name": f"r{number}", "weights": weights}
            | ({"url": engine.url} if isinstance(engine, ScriptedEngine) else engine)
            for number, engine in enumerate(replicas)
        ],
        "pairs": [
            {
                "name": f"p{number}",
                "prefill": {"url": pair.prefill.url, "weights": weights | {"precision": "fp8"}},
                "decode": {"url": pair.decode.url, "weights": weights | {"precision": "int4"}},
            }
            for number, pair in enumerate(pairs)
        ],
        "groups": list(groups),
    } | fields


def _toml(name: str, table: dict[str, Any]) -> str:
    """A table of an array, its arrays of tables inline: enough for what `model` makes."""
    return f"[[{name}]]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return json.dumps(value)
