"""What a good request gets: both result shapes, the whole output the model may give, and its price."""

import pytest

from tests.e2e.dialects import CHAT, COMPLETIONS, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.service import Service


class TestWholeAnswers:
    async def test_run_gives_both_shapes_and_they_agree(self, service: Service) -> None:
        answer = (await service.post(RUN.path(service), RUN.body(service, max_tokens=3))).json()
        result = answer["result"]
        assert (answer["success"], answer["errors"], answer["messages"]) == (True, [], [])
        assert result["response"] == "w0 w1 w2 " == result["choices"][0]["message"]["content"]
        assert result["tool_calls"] == []
        assert result["choices"][0]["finish_reason"] == "length"

    async def test_run_takes_a_prompt_as_one_user_message(self, service: Service) -> None:
        await service.post(RUN.path(service), RUN.body(service, messages=None, prompt="Say something."))
        await service.post(RUN.path(service), RUN.body(service))
        first, second = (received.body["input_ids"] for received in service.engine.requests)
        assert first == second

    async def test_a_raw_prompt_is_sent_without_a_template(self, service: Service) -> None:
        await service.post(RUN.path(service), RUN.body(service, messages=None, prompt="Say something.", raw=True))
        await service.post(COMPLETIONS.path(service), COMPLETIONS.body(service))
        first, second = (received.body["prompt"] for received in service.engine.requests)
        assert first == second

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_the_id_of_an_answer_finds_its_record(self, service: Service, dialect: Dialect) -> None:
        answer = await service.post(dialect.path(service), dialect.body(service))
        body = answer.json()["result"] if dialect is RUN else answer.json()
        row = await service.record(body["id"])
        assert row["outcome"] == "finished"
        assert body["id"] == answer.headers["x-request-id"]
        assert body["model"] == service.model

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_nothing_of_the_engine_shows(self, service: Service, dialect: Dialect) -> None:
        answer = await service.post(dialect.path(service), dialect.body(service))
        for inner in (b"matched_stop", b"weight_version", b"hidden_states", b"scripted"):
            assert inner not in answer.body


class TestOutputCap:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_without_max_tokens_the_answer_is_not_cut_at_256(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(tokens=300)
        answer = await service.post(dialect.path(service), dialect.body(service, max_tokens=None))
        assert answer.status == 200, answer.body
        assert dialect.usage_of(answer.json())["completion_tokens"] == 300
        assert "x-pagegate-max-tokens" not in answer.headers

    async def test_a_larger_one_is_clamped_and_the_answer_says_so(self, service: Service) -> None:
        service.engine.steer(tokens=2)
        answer = await service.post(CHAT.path(service), CHAT.body(service, max_tokens=10_000_000))
        assert answer.status == 200, answer.body
        clamped = int(answer.headers["x-pagegate-max-tokens"])
        assert service.engine.requests[-1].body["max_tokens"] == clamped < 10_000_000

    async def test_a_cut_answer_says_length(self, service: Service) -> None:
        answer = await service.post(CHAT.path(service), CHAT.body(service, max_tokens=2))
        assert answer.json()["choices"][0]["finish_reason"] == "length"

    async def test_two_choices_are_two_calls_with_ids_of_their_own_and_one_record(self, service: Service) -> None:
        answer = await service.post(CHAT.path(service), CHAT.body(service, n=2, max_tokens=3))
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
        assert len({received.body["rid"] for received in service.engine.requests}) == 2
        assert answer.json()["usage"]["completion_tokens"] == 6
        await service.oracle(rows=1)
