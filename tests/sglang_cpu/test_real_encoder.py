"""Embeddings by the real SGLang through the gateway: vectors by OpenAI's client, counted and paid for by the token."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from backends.checkpoints import EMBEDDING_CHECKPOINT, default_cache_dir, pull
from backends.local.embeddings import Embedder, EmbeddingBody
from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service, running_service
from tests.engines import build_tiny_checkpoint
from tests.sglang_cpu.server import TEST_S_MAX, start_encoder

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_S_MAX)]
MODEL = "@cf/sentence-transformers/all-minilm-l6-v2"
TEXTS = ["the pages are scarce", "thing"]
TOKENS = 6 + 3
WIDTH = 384


@pytest.fixture(scope="module")
def encoder() -> Path:
    """The real one. Its vectors are means: SGLang by itself would take the first token's state."""
    cache_dir = default_cache_dir(os.environ)  # noqa: TID251  tests stand where api/settings.py would
    return pull(EMBEDDING_CHECKPOINT, cache_dir, lambda here, total: None)


@pytest.fixture(scope="module")
def sglang_url(encoder: Path) -> Iterator[str]:
    with start_encoder(encoder, name=MODEL) as url:
        yield url


@pytest.fixture
async def service(tmp_path: Path, encoder: Path, sglang_url: str) -> AsyncIterator[Service]:
    attached = {"embedding_url": sglang_url, "embedding_checkpoint": encoder}
    tiny = build_tiny_checkpoint(tmp_path / "tiny")
    async with (
        ScriptedEngine() as engine,
        running_service(tmp_path / "home", tiny, engine, backends=attached, embedding_model_id=MODEL) as service,
    ):
        yield service


def ids_of(encoder: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(encoder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return list(tokenizer.encode(text).ids)


async def test_vectors_are_pooled_as_the_folder_says_and_are_the_local_engines(encoder: Path, sglang_url: str) -> None:
    """Ids of several lengths in one batch: a mean must not reach into its neighbours."""
    texts = ["The cat sleeps on the mat.", "Pages", "Interest rates rose again, said the bank. " * 8]
    asked: dict[str, Any] = {"model": MODEL, "input": [ids_of(encoder, text) for text in texts]}
    embedder = Embedder(encoder, MODEL)
    async with aiohttp.ClientSession() as session, session.post(sglang_url + "/v1/embeddings", json=asked) as response:
        found = [row["embedding"] for row in (await response.json())["data"]]
    local = json.loads(await embedder.answer(EmbeddingBody(**asked)))
    embedder.close()
    for one, other in zip(found, local["data"], strict=True):
        assert one == pytest.approx(other["embedding"], abs=1e-4)


async def test_openais_client_gets_vectors_of_sglang_and_pays_for_tokens(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0) as client:
        answer = await client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64 by itself
        floats = await client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert [len(row.embedding) for row in answer.data] == [WIDTH, WIDTH]
    assert answer.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-5)
    assert answer.data[0].embedding != pytest.approx(answer.data[1].embedding, abs=1e-3)
    assert sum(part * part for part in answer.data[0].embedding) == pytest.approx(1.0, abs=1e-3)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == TOKENS
    await service.oracle(rows=2)
    record = (await service.records())[1]
    assert (record["prompt_tokens"], record["outcome"]) == (TOKENS, "finished")
    assert record["cost_nano"] > 0
