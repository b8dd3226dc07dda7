"""Embeddings by the real SGLang through the gateway: vectors by OpenAI's client, counted and paid for by the token."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from backends.local.embeddings import Embedder, EmbeddingBody
from backends.pooling import say_pooling
from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service, running_service
from tests.engines import build_tiny_checkpoint
from tests.sglang_cpu.server import TEST_S_MAX, start_encoder
from tests.tiny_encoder import WIDTH, build_tiny_encoder

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TEST_S_MAX)]
MODEL = "@cf/test/tiny-encoder"
TEXTS = ["the pages are scarce", "thing"]
TOKENS = 6 + 3


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vectors are means, as those of all-MiniLM-L6-v2: SGLang by itself would take the first token's state."""
    folder = build_tiny_encoder(tmp_path_factory.mktemp("encoder"))
    say_pooling(folder, "mean")
    return folder


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


async def test_vectors_are_pooled_as_the_folder_says_and_are_the_local_engines(encoder: Path, sglang_url: str) -> None:
    """Ids of several lengths in one batch: a mean must not reach into its neighbours."""
    asked: dict[str, Any] = {"model": MODEL, "input": [[2, 4, 5, 6, 7, 3], [2, 8, 3], [2, 9, 10, 11, 3]]}
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
