"""The vendors' own clients read what is served: openai's and Cloudflare's Python packages, over real sockets."""

from collections.abc import AsyncIterator
from typing import Any

import cloudflare
import openai
import pytest

from tests.doubles.waiting import eventually_async
from tests.e2e.service import Service

PREFIXES = ["/v1", "/client/v4/accounts/{account}/ai/v1"]


@pytest.fixture(params=PREFIXES)
async def client(service: Service, request: pytest.FixtureRequest) -> AsyncIterator[openai.AsyncOpenAI]:
    prefix = request.param.format(account=service.account_id)
    async with openai.AsyncOpenAI(
        base_url=service.base_url + prefix, api_key=service.api_key, max_retries=0, timeout=10
    ) as client:
        yield client


class TestOpenAI:
    async def test_chat(self, client: openai.AsyncOpenAI, service: Service) -> None:
        answer = await client.chat.completions.create(
            model=service.model, messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        assert answer.choices[0].message.content == "w0 w1 w2 "
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        assert answer.usage.prompt_tokens_details is not None
        assert (await service.record(answer.id))["completion_tokens"] == 3

    async def test_a_chat_stream(self, client: openai.AsyncOpenAI, service: Service) -> None:
        stream = await client.chat.completions.create(
            model=service.model,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "w0 w1 w2 "
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [3]

    async def test_the_accumulating_stream_helper(self, client: openai.AsyncOpenAI, service: Service) -> None:
        async with client.chat.completions.stream(
            model=service.model, messages=[{"role": "user", "content": "hi"}], max_tokens=3
        ) as stream:
            final = await anext(event async for event in stream if event.type == "content.done")
        assert final.content == "w0 w1 w2 "

    async def test_completions_streamed_and_not(self, client: openai.AsyncOpenAI, service: Service) -> None:
        answer = await client.completions.create(model=service.model, prompt="hi", max_tokens=2)
        assert answer.choices[0].text == "w0 w1 "
        stream = await client.completions.create(model=service.model, prompt="hi", max_tokens=2, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == "w0 w1 "

    async def test_models(self, client: openai.AsyncOpenAI, service: Service) -> None:
        assert [model.id async for model in client.models.list()] == [service.model]
        assert (await client.models.retrieve(service.model)).id == service.model

    async def test_errors_are_its_own_classes(self, client: openai.AsyncOpenAI, service: Service) -> None:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="none", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model=service.model, messages=[{"role": "user", "content": "hi"}], temperature=9
            )
        assert "temperature" in bad.value.message
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("none")

    async def test_a_failure_in_mid_stream_raises(self, client: openai.AsyncOpenAI, service: Service) -> None:
        service.engine.steer(die_after=2, itl_ms=5)
        stream = await client.chat.completions.create(
            model=service.model, messages=[{"role": "user", "content": "hi"}], max_tokens=9, stream=True
        )
        with pytest.raises(openai.APIError):
            [chunk async for chunk in stream]

    async def test_a_bad_key_is_an_authentication_error(self, service: Service) -> None:
        async with openai.AsyncOpenAI(base_url=service.base_url + "/v1", api_key="sk-no", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()

    async def test_a_closed_stream_stops_the_engine(self, client: openai.AsyncOpenAI, service: Service) -> None:
        service.engine.steer(itl_ms=10)
        stream = await client.chat.completions.create(
            model=service.model, messages=[{"role": "user", "content": "hi"}], max_tokens=400, stream=True
        )
        await anext(aiter(stream))
        await stream.close()
        await service.oracle(rows=1)
        assert (await service.records())[0]["outcome"] == "client_disconnected"


@pytest.fixture
async def native(service: Service) -> AsyncIterator[cloudflare.AsyncCloudflare]:
    async with cloudflare.AsyncCloudflare(
        base_url=service.base_url + "/client/v4", api_token=service.api_key, max_retries=0, timeout=10
    ) as client:
        yield client


class TestCloudflare:
    async def test_run_with_messages_and_with_a_prompt(
        self, native: cloudflare.AsyncCloudflare, service: Service
    ) -> None:
        result = await native.ai.run(
            service.model, account_id=service.account_id, messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        assert isinstance(result, dict)
        assert result["response"] == "w0 w1 w2 "
        result = await native.ai.run(service.model, account_id=service.account_id, prompt="hi", max_tokens=2)
        assert isinstance(result, dict)
        assert result["usage"]["completion_tokens"] == 2

    async def test_a_stream(self, native: cloudflare.AsyncCloudflare, service: Service) -> None:
        async with native.ai.with_streaming_response.run(
            service.model, account_id=service.account_id, prompt="hi", max_tokens=2, stream=True
        ) as response:
            lines = [line async for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"

    async def test_a_batch(self, native: cloudflare.AsyncCloudflare, service: Service) -> None:
        async def run(body: dict[str, Any], query: dict[str, Any] | None = None) -> dict[str, Any]:
            answer = await native.ai.run(
                service.model, account_id=service.account_id, extra_body=body, extra_query=query
            )
            assert isinstance(answer, dict)
            return answer

        asked = {"requests": [{"prompt": "One.", "max_tokens": 2, "external_reference": "a"}]}
        queued = await run(asked, {"queueRequest": True})
        question = {"request_id": queued["request_id"]}

        async def is_answered() -> bool:
            return "responses" in await run(question)

        await eventually_async(is_answered, within_s=10, what="the responses")
        [item] = (await run(question))["responses"]
        assert (item["success"], item["external_reference"]) == (True, "a")

    async def test_models_and_tokens(self, native: cloudflare.AsyncCloudflare, service: Service) -> None:
        models = [model async for model in native.ai.models.list(account_id=service.account_id)]
        assert len(models) == 1
        verified = await native.user.tokens.verify()
        assert verified is not None
        assert verified.status == "active"
        verified_here = await native.accounts.tokens.verify(account_id=service.account_id)
        assert verified_here is not None
        assert verified_here.status == "active"

    async def test_errors_are_its_own_classes(self, native: cloudflare.AsyncCloudflare, service: Service) -> None:
        with pytest.raises(cloudflare.BadRequestError) as unknown:
            await native.ai.run("@cf/no/such", account_id=service.account_id, prompt="hi")
        assert unknown.value.errors[0].code == 5007
        with pytest.raises(cloudflare.PermissionDeniedError):
            await native.ai.run(service.model, account_id="0" * 32, prompt="hi")
