"""Python's agent libraries drive a running server: langchain over both dialects, and instructor.

They run in a thread: their synchronous forms are what most people use.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_cloudflare import ChatCloudflareWorkersAI, CloudflareWorkersAIEmbeddings
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.e2e.generating import EMBEDDING_MODEL, generating_engine, generating_service
from tests.e2e.service import Service
from tests.engines import LocalEngine
from tests.tiny_encoder import WIDTH

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]


@pytest.fixture(autouse=True)
def sockets_of_their_own() -> Iterator[None]:
    """Some of these clients leave their connections to the garbage collector."""
    yield
    gc.collect()


QUESTION = "What is the weather in Oslo?"


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Bergen"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generating")


@pytest.fixture(scope="module")
def local_engine(folder: Path) -> Iterator[LocalEngine]:
    with generating_engine(folder) as engine:
        yield engine


@pytest.fixture
async def service(tmp_path: Path, folder: Path, local_engine: LocalEngine) -> AsyncIterator[Service]:
    async with generating_service(tmp_path / "home", folder, local_engine) as service:
        yield service


def chat_openai(service: Service, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=service.base_url + "/v1",
        api_key=SecretStr(service.api_key),
        model=service.model,
        max_retries=0,
        temperature=0,  # a random draw of a random model may end at once
        **{"max_completion_tokens": 200, **more},
    )


class TestLangchainOpenAI:
    async def test_answers_and_streams_with_usage(self, service: Service) -> None:
        model = chat_openai(service, max_completion_tokens=8, stream_usage=True)
        whole = await asyncio.to_thread(model.invoke, QUESTION)
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["output_tokens"] == 8
        chunks = [chunk async for chunk in model.astream(QUESTION)]
        added = chunks[0]
        for chunk in chunks[1:]:
            added += chunk
        assert isinstance(added, AIMessageChunk)
        assert added.usage_metadata is not None
        assert added.usage_metadata["output_tokens"] == 8

    async def test_calls_tools_and_reads_their_results(self, service: Service) -> None:
        model = chat_openai(service).bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
        asked: list[Any] = [HumanMessage(QUESTION)]
        called = await asyncio.to_thread(model.invoke, asked)
        (call,) = called.tool_calls
        assert Weather.model_validate(call["args"])
        after = await asyncio.to_thread(
            model.invoke, [*asked, called, ToolMessage("19 degrees", tool_call_id=call["id"])]
        )
        assert after.tool_calls[0]["id"] != call["id"]

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    async def test_gives_structured_output(
        self, service: Service, method: Literal["json_schema", "function_calling"]
    ) -> None:
        model = chat_openai(service).with_structured_output(Weather, method=method)
        assert isinstance(await asyncio.to_thread(model.invoke, QUESTION), Weather)

    async def test_embeds(self, service: Service) -> None:
        embeddings = OpenAIEmbeddings(
            openai_api_base=service.base_url + "/v1",
            openai_api_key=SecretStr(service.api_key),
            model=EMBEDDING_MODEL,
            check_embedding_ctx_length=False,  # else it counts, and sends, another tokenizer's ids
            max_retries=0,
        )
        vectors = await asyncio.to_thread(embeddings.embed_documents, ["a", "b"])
        assert [len(vector) for vector in vectors] == [WIDTH, WIDTH]


class TestLangchainCloudflare:
    @pytest.fixture
    def model(self, service: Service) -> ChatCloudflareWorkersAI:
        return ChatCloudflareWorkersAI(
            account_id=service.account_id,
            api_token=SecretStr(service.api_key),
            base_url=service.base_url + "/client/v4",
            model=service.model,
            max_tokens=200,
            temperature=0,
        )

    async def test_answers_and_streams(self, model: ChatCloudflareWorkersAI) -> None:
        whole = await asyncio.to_thread(model.invoke, QUESTION)
        assert whole.content
        chunks = await asyncio.to_thread(lambda: list(model.stream(QUESTION)))
        added = chunks[0]
        for chunk in chunks[1:]:
            added += chunk
        assert added.content

    async def test_calls_tools(self, model: ChatCloudflareWorkersAI) -> None:
        called = await asyncio.to_thread(model.bind_tools([Weather], tool_choice="any").invoke, QUESTION)
        assert called.tool_calls
        for call in called.tool_calls[:1]:
            assert Weather.model_validate(call["args"])

    async def test_embeds(self, service: Service) -> None:
        embeddings = CloudflareWorkersAIEmbeddings(
            account_id=service.account_id,
            api_token=SecretStr(service.api_key),
            api_base_url=f"{service.base_url}/client/v4/accounts",
            model_name=EMBEDDING_MODEL,
        )
        vectors = await asyncio.to_thread(embeddings.embed_documents, ["a", "b"])
        assert [len(vector) for vector in vectors] == [WIDTH, WIDTH]


class TestInstructor:
    @pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
    async def test_gives_the_model_that_was_asked_for(self, service: Service, mode: instructor.Mode) -> None:
        async with openai.AsyncOpenAI(
            base_url=service.base_url + "/v1", api_key=service.api_key, max_retries=0
        ) as plain:
            client = instructor.from_openai(plain, mode=mode)
            weather = await client.chat.completions.create(
                model=service.model,
                response_model=Weather,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=200,
                temperature=0,
                max_retries=0,
            )
        assert isinstance(weather, Weather)
