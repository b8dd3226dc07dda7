"""Vectors are those of the reference implementation, whatever else is in the batch, and faults are said at once."""

import asyncio
import base64
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from backends.checkpoints import EMBEDDING_CHECKPOINT, checkpoint_path, default_cache_dir
from backends.local import embeddings
from backends.local.embeddings import BATCH_TOKENS, Embedder, EmbeddingBody
from backends.local.errors import InvalidRequestError, QueueFullError, StartError
from backends.pooling import POOLING_FILE, say_pooling
from tests.backends.local.reference import transformers
from tests.tiny_encoder import CONTEXT, WIDTH, build_tiny_encoder

TEXTS = ["the pages are scarce", "a gate is driven by pages", "thing"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def embedder(folder: Path) -> Iterator[Embedder]:
    embedder = Embedder(folder, "tiny")
    yield embedder
    embedder.close()


async def vectors(embedder: Embedder, given: Any, **fields: Any) -> list[Any]:
    answer = json.loads(await embedder.answer(EmbeddingBody(input=given, **fields)))
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    return [row["embedding"] for row in answer["data"]]


@pytest.mark.load
async def test_a_folder_that_says_so_is_pooled_by_the_first_token(folder: Path, tmp_path: Path) -> None:
    said = Path(shutil.copytree(folder, tmp_path / "cls"))
    say_pooling(said, "cls")
    reference = transformers().AutoModel.from_pretrained(folder).eval()
    embedder = Embedder(said, "tiny")
    for ids in ([2, 4, 5, 6, 7, 3], [2, 3]):
        with torch.inference_mode():
            hidden = reference(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
        (found,) = await vectors(embedder, ids)
        assert torch.allclose(torch.tensor(found), torch.nn.functional.normalize(hidden, dim=-1), atol=1e-5)
    embedder.close()


def test_a_folder_that_asks_for_another_pooling_cant_be_served(folder: Path, tmp_path: Path) -> None:
    said = Path(shutil.copytree(folder, tmp_path / "max"))
    (said / POOLING_FILE).parent.mkdir()
    (said / POOLING_FILE).write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(StartError, match="max_tokens"):
        Embedder(said, "x")


@pytest.mark.load
async def test_vectors_are_the_references(embedder: Embedder, folder: Path) -> None:
    reference = transformers().AutoModel.from_pretrained(folder).eval()
    for ids in ([2, 4, 5, 6, 7, 3], [2, 3], list(range(2, 14)) * 5):
        with torch.inference_mode():
            hidden = reference(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        wanted = torch.nn.functional.normalize(hidden, dim=-1)
        (found,) = await vectors(embedder, ids)
        assert torch.allclose(torch.tensor(found), wanted, atol=1e-5)


async def test_neighbours_and_padding_change_nothing(embedder: Embedder) -> None:
    alone = [(await vectors(embedder, text))[0] for text in TEXTS]
    together = await vectors(embedder, TEXTS)
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(torch.tensor(one), torch.tensor(other), atol=1e-6)
        assert math.isclose(math.hypot(*one), 1.0, abs_tol=1e-6)


async def test_more_than_a_pass_takes_comes_back_in_order(embedder: Embedder) -> None:
    long = ["pages " * (CONTEXT - 2)] * (2 * BATCH_TOKENS // CONTEXT) + TEXTS
    found = await vectors(embedder, long)
    assert found[-1] == pytest.approx((await vectors(embedder, TEXTS[-1]))[0], abs=1e-6)


async def test_ids_and_text_count_the_same_tokens(embedder: Embedder) -> None:
    told = json.loads(await embedder.answer(EmbeddingBody(input=TEXTS[0])))
    assert told["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert told["data"][0]["embedding"] == (await vectors(embedder, [[2, 4, 5, 6, 7, 3]]))[0]


async def test_base64_is_the_same_numbers(embedder: Embedder) -> None:
    (floats,) = await vectors(embedder, "pages")
    (text,) = await vectors(embedder, "pages", encoding_format="base64")
    assert list(struct.unpack(f"<{WIDTH}f", base64.b64decode(text))) == floats


async def test_what_cant_be_embedded_is_refused(embedder: Embedder) -> None:
    for given in ("pages " * CONTEXT, [10**6]):
        with pytest.raises(InvalidRequestError):
            await embedder.answer(EmbeddingBody(input=given))
    assert len(await vectors(embedder, "a", dimensions=WIDTH)) == 1
    with pytest.raises(InvalidRequestError, match="dimensions"):
        await embedder.answer(EmbeddingBody(input="a", dimensions=WIDTH - 1))


@pytest.mark.parametrize("given", [[], [[]], [1.5], [["a"]], 7, None, [-1]])
def test_shapes_that_are_no_input_are_refused(given: Any) -> None:
    with pytest.raises(ValidationError):
        EmbeddingBody(input=given)


async def test_the_waiting_are_bounded(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "WAITING_MAX", 2)
    waiting = [asyncio.create_task(embedder.answer(EmbeddingBody(input=TEXTS))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await embedder.answer(EmbeddingBody(input="a"))
    await asyncio.gather(*waiting)


def test_a_folder_of_something_else_cant_be_served(tmp_path: Path) -> None:
    with pytest.raises(StartError):
        Embedder(tmp_path, "x")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(StartError, match="BertModel"):
        Embedder(tmp_path, "x")


@pytest.mark.engine
async def test_the_real_model_finds_what_is_alike() -> None:
    cache_dir = default_cache_dir(os.environ)  # noqa: TID251  tests stand where api/settings.py would
    embedder = Embedder(checkpoint_path(EMBEDDING_CHECKPOINT, cache_dir), "real")
    try:
        cat, kitten, money = await vectors(
            embedder, ["A cat sleeps on the sofa.", "The kitten naps on a couch.", "The central bank raised its rate."]
        )
    finally:
        embedder.close()

    def likeness(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert likeness(cat, kitten) > 0.5
    assert likeness(cat, money) < 0.2
