"""What is published is what is enforced: the published number passes, the next one does not."""

import json
from pathlib import Path
from typing import Any

import cloudflare
import pytest

from tenancy.provisioning import set_plan
from tenancy.quotas import Plan
from tests.doubles.engine import ScriptedEngine
from tests.doubles.waiting import eventually_async
from tests.e2e.dialects import CHAT, COMPLETIONS, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.service import Service, running_service


async def result(service: Service, tail: str) -> Any:
    answer = await service.send("GET", f"/client/v4/accounts/{service.account_id}/ai/{tail}")
    assert answer.status == 200, answer.body
    return answer.json()["result"]


async def published(service: Service, name: str) -> int:
    (model,) = await result(service, "models/search")
    return int(next(one["value"] for one in model["properties"] if one["property_id"] == name))


class TestContext:
    async def test_a_prompt_of_the_published_length_passes_and_one_more_token_does_not(self, service: Service) -> None:
        longest = await published(service, "max_input_tokens")
        assert longest == await published(service, "context_window") - 1
        path = COMPLETIONS.path(service)
        fits = await service.post(path, COMPLETIONS.body(service, prompt=[5] * longest, max_tokens=1))
        assert (fits.status, fits.json()["usage"]["prompt_tokens"]) == (200, longest)
        beyond = await service.post(path, COMPLETIONS.body(service, prompt=[5] * (longest + 1), max_tokens=1))
        assert (beyond.status, beyond.json()["error"]["code"]) == (400, "context_length_exceeded")
        said = beyond.json()["error"]["message"]
        assert str(longest) in said
        assert str(longest + 1) in said
        await service.oracle(rows=1)

    async def test_the_native_dialect_refuses_with_its_own_code(self, service: Service) -> None:
        beyond = "word " * await published(service, "context_window")
        answer = await service.post(RUN.path(service), RUN.body(service, messages=None, prompt=beyond))
        assert (answer.status, answer.json()["errors"][0]["code"]) == (413, 5021)

    async def test_an_output_of_the_published_length_passes_and_one_more_is_lowered_to_it(
        self, service: Service
    ) -> None:
        most = await published(service, "max_output_tokens")
        service.engine.steer(tokens=1)
        for asked, lowered_to in ((most, None), (most + 1, str(most))):
            body = COMPLETIONS.body(service, prompt=[5], max_tokens=asked)
            answer = await service.post(COMPLETIONS.path(service), body)
            assert (answer.status, answer.headers.get("x-pagegate-max-tokens")) == (200, lowered_to)

    async def test_both_shapes_of_the_search_publish_the_same(self, service: Service) -> None:
        (model,) = (await result(service, "models/search?format=openrouter"))["data"]
        assert model["context_length"] == await published(service, "context_window")
        assert model["max_output_length"] == await published(service, "max_output_tokens")


class TestRequests:
    async def test_the_published_number_of_choices_is_the_most(self, service: Service) -> None:
        schema = await result(service, f"models/schema?model={service.model}")
        most = schema["input"]["properties"]["n"]["maximum"]
        fits = await service.post(RUN.path(service), RUN.body(service, n=most, max_tokens=1))
        assert len(fits.json()["result"]["choices"]) == most
        assert (await service.post(RUN.path(service), RUN.body(service, n=most + 1))).status == 400
        assert (await service.post(CHAT.path(service), CHAT.body(service, n=most + 1))).status == 400
        await service.oracle(rows=1)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_a_body_of_the_set_size_is_the_largest(
        self, tmp_path: Path, checkpoint: Path, engine: ScriptedEngine, dialect: Dialect
    ) -> None:
        async with running_service(tmp_path / "home", checkpoint, engine, body_bytes_max=2_048) as service:
            for spare, status in ((0, 200), (1, 413)):
                body = dialect.body(service, prompt_cache_key="")
                body["prompt_cache_key"] = "x" * (2_048 - len(json.dumps(body)) + spare)
                sent = json.dumps(body).encode()
                assert len(sent) == 2_048 + spare
                answer = await service.post(dialect.path(service), sent)
                assert answer.status == status, answer.body


class TestTheListings:
    async def test_are_read_by_the_vendors_client(self, service: Service) -> None:
        async with cloudflare.AsyncCloudflare(
            base_url=service.base_url + "/client/v4", api_token=service.api_key, max_retries=0, timeout=10
        ) as client:
            tasks: list[Any] = [one async for one in client.ai.tasks.list(account_id=service.account_id)]
            assert [task["name"] for task in tasks] == ["Text Generation"]
            authors: list[Any] = [one async for one in client.ai.authors.list(account_id=service.account_id)]
            assert len(authors) == 1
            schema = await client.ai.models.schema.get(account_id=service.account_id, model=service.model)
            assert schema.to_dict()["input"]


class TestUsage:
    async def test_agrees_with_what_the_answers_cost(self, service: Service) -> None:
        answers = [await service.post(dialect.path(service), dialect.body(service)) for dialect in DIALECTS]
        neurons = sum(float(answer.headers["cf-ai-neurons"]) for answer in answers)
        usage = await result(service, "usage?group_by=model,day")
        (group,) = usage["groups"]
        assert group["model"] == service.model
        assert group["day"] == usage["today"]["date"]
        assert group["requests"] == usage["totals"]["requests"] == len(DIALECTS)
        assert group["neurons"] == pytest.approx(neurons)
        assert usage["today"]["neurons_used"] == group["neurons"]
        assert usage["today"]["neurons_left"] is None

    async def test_tells_what_is_left_of_the_free_neurons(self, service: Service) -> None:
        set_plan(service.services.database, service.account_id, Plan.FREE)
        # The cached key is believed for a moment longer.
        await eventually_async(lambda: _has_limit(service), what="the free plan in force")
        fresh = (await result(service, "usage"))["today"]["neurons_left"]
        await service.post(RUN.path(service), RUN.body(service))
        today = (await result(service, "usage"))["today"]
        assert today["neurons_limit"] == 10_000
        assert today["neurons_left"] < fresh
        assert today["neurons_left"] + today["neurons_used"] == pytest.approx(fresh)


async def _has_limit(service: Service) -> bool:
    return (await result(service, "usage"))["today"]["neurons_left"] is not None
