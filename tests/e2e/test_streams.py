"""Streams to the byte: what the engine said is what the client reads, and each ends exactly once, however it ends."""

from typing import Any

import orjson
import pytest

from tests.doubles.waiting import eventually
from tests.e2e.dialects import ACCOUNT_CHAT, CHAT, COMPLETIONS, DIALECTS, RUN, Dialect, dialect_name
from tests.e2e.service import Answer, Service

SAID = "北🙂"


async def stream(service: Service, dialect: Dialect, **fields: Any) -> Answer:
    answer = await service.post(dialect.path(service), dialect.body(service, stream=True, **fields))
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer


def chunks(events: list[bytes]) -> list[dict[str, Any]]:
    """All events but [DONE], read."""
    return [orjson.loads(event) for event in events if event != b"[DONE]"]


def finish_reasons(dialect: Dialect, events: list[bytes]) -> list[str]:
    """Every finish reason in the stream, in order."""
    if dialect is RUN:
        reasons = [frame.get("finish_reason") for frame in chunks(events)]
    else:
        reasons = [choice["finish_reason"] for chunk in chunks(events) for choice in chunk["choices"]]
    return [reason for reason in reasons if reason is not None]


class TestBytes:
    @pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS, RUN], ids=dialect_name)
    async def test_a_character_cut_anywhere_arrives_whole(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(text=SAID)
        await stream(service, dialect, max_tokens=2)
        (sent,) = service.engine.sent.values()
        at = bytes(sent).index(SAID.encode())
        for offset in range(len(SAID.encode()) + 1):
            service.engine.steer(text=SAID, cut=(at + offset,))
            answer = await stream(service, dialect, max_tokens=2)
            assert dialect.said(answer.events()) == SAID * 2, offset
        await service.oracle(rows=len(SAID.encode()) + 2)

    async def test_every_byte_in_a_write_of_its_own_changes_nothing(self, service: Service) -> None:
        service.engine.steer(text=SAID, cut=tuple(range(3_000)))
        answer = await stream(service, CHAT, max_tokens=3)
        assert CHAT.said(answer.events()) == SAID * 3
        assert answer.body.endswith(b"data: [DONE]\n\n")

    async def test_the_text_of_the_engine_is_relayed_byte_by_byte(self, service: Service) -> None:
        nasty = 'a"b\\c\n\t\u2028<|im_end|>data: [DONE]\\u0041 ,"usage":{"completion_tokens":9}}'
        service.engine.steer(text=nasty)
        for dialect in DIALECTS:
            answer = await stream(service, dialect, max_tokens=2)
            assert dialect.said(answer.events()) == nasty * 2
        await service.oracle(rows=len(DIALECTS))
        assert {row["completion_tokens"] for row in await service.records()} == {2}


class TestShape:
    @pytest.mark.parametrize("dialect", [CHAT, ACCOUNT_CHAT], ids=dialect_name)
    async def test_chat_is_role_text_one_finish_and_done(self, service: Service, dialect: Dialect) -> None:
        events = (await stream(service, dialect, max_tokens=3)).events()
        assert events[-1] == b"[DONE]"
        assert events.count(b"[DONE]") == 1
        deltas = [choice["delta"] for chunk in chunks(events) for choice in chunk["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert [delta["content"] for delta in deltas if delta.get("content")] == ["w0 ", "w1 ", "w2 "]
        assert finish_reasons(dialect, events) == ["length"]

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_one_finish_and_done_once(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(tokens=3)
        events = (await stream(service, dialect, max_tokens=8)).events()
        assert finish_reasons(dialect, events) == ["stop"]
        assert [index for index, event in enumerate(events) if event == b"[DONE]"] == [len(events) - 1]
        await service.oracle(rows=1)

    async def test_the_id_of_a_stream_is_the_id_of_its_record(self, service: Service) -> None:
        answer = await stream(service, CHAT, stream_options={"include_usage": True})
        (name,) = {chunk["id"] for chunk in chunks(answer.events())}
        assert answer.headers["x-request-id"] == name
        assert (await service.record(name))["outcome"] == "finished"
        assert {chunk["model"] for chunk in chunks(answer.events())} == {service.model}

    async def test_native_frames_always_say_a_string(self, service: Service) -> None:
        service.engine.steer(text="1")
        events = (await stream(service, RUN)).events()
        assert all(isinstance(frame["response"], str) for frame in chunks(events))
        assert all(isinstance(frame["p"], str) for frame in chunks(events))

    async def test_two_choices_each_have_a_role_a_finish_and_their_tokens(self, service: Service) -> None:
        answer = await stream(service, CHAT, n=2, max_tokens=4, stream_options={"include_usage": True})
        events = answer.events()
        for index in (0, 1):
            mine = [c for chunk in chunks(events) for c in chunk["choices"] if c["index"] == index]
            assert mine[0]["delta"]["role"] == "assistant"
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert usages(events)[0]["completion_tokens"] == 8
        await service.oracle(rows=1)

    async def test_a_first_token_after_the_headers_still_arrives(self, service: Service) -> None:
        service.engine.steer(ttft_s=2.5)
        answer = await service.post(CHAT.path(service), CHAT.body(service, stream=True, max_tokens=3))
        assert CHAT.said(answer.events()) == "w0 w1 w2 "
        assert answer.events()[-1] == b"[DONE]"
        await service.oracle(rows=1)


def usages(events: list[bytes]) -> list[dict[str, Any]]:
    return [chunk["usage"] for chunk in chunks(events) if chunk.get("usage") is not None]


class TestUsage:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    @pytest.mark.parametrize("asked", [True, False, None])
    async def test_it_comes_once_in_a_chunk_of_its_own_or_not_at_all(
        self, service: Service, dialect: Dialect, *, asked: bool | None
    ) -> None:
        service.engine.steer(usage={"cached_tokens": 1})
        options = None if asked is None else {"include_usage": asked}
        events = (await stream(service, dialect, max_tokens=5, stream_options=options)).events()
        shown = usages(events)
        assert len(shown) == int(dialect.always_usage if asked is None else asked)
        if shown:
            last = orjson.loads(events[-2])
            assert last["usage"] == shown[0]
            assert dialect is RUN or last["choices"] == []
            assert shown[0]["prompt_tokens_details"]["cached_tokens"] == 1
        await service.oracle(rows=1)
        (row,) = await service.records()
        assert (row["completion_tokens"], row["cached_tokens"]) == (5, 1)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    async def test_it_is_the_same_field_by_field_streamed_and_not(self, service: Service, dialect: Dialect) -> None:
        service.engine.steer(usage={"cached_tokens": 3})
        whole = (await service.post(dialect.path(service), dialect.body(service))).json()
        events = (await stream(service, dialect, stream_options={"include_usage": True})).events()
        assert usages(events) == [dialect.usage_of(whole)]

    async def test_the_client_can_not_ask_the_engine_for_running_usage(self, service: Service) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await stream(service, CHAT, stream_options=options)).events()
        assert len(usages(events)) == 1

    async def test_a_stream_that_ends_without_done_is_a_success_and_gets_one(self, service: Service) -> None:
        for dialect in DIALECTS:
            service.engine.steer(no_done=True)
            events = (await stream(service, dialect)).events()
            assert events[-1] == b"[DONE]"
        await service.oracle(rows=len(DIALECTS))
        assert {(row["outcome"], row["completion_tokens"]) for row in await service.records()} == {("finished", 8)}


class TestEngineFailure:
    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    @pytest.mark.parametrize("how", ["die_after", "error_after"])
    async def test_in_mid_stream_is_an_error_event_and_no_end(
        self, service: Service, dialect: Dialect, how: str
    ) -> None:
        service.engine.steer(itl_ms=5, **{how: 7})
        events = (await stream(service, dialect, max_tokens=100)).events()
        assert b"[DONE]" not in events
        last = orjson.loads(events[-1])
        assert last["error"]["message"]
        assert last["errors"][0]["code"]
        assert "scripted" not in last["error"]["message"], "the engine's own words stay inside"
        assert finish_reasons(dialect, events[:-1]) == []
        await service.oracle(rows=1)
        (row,) = await service.records()
        assert (row["outcome"], row["completion_tokens"], row["cost_nano"]) == ("upstream_failed", 7, 0)

    @pytest.mark.parametrize("dialect", DIALECTS, ids=dialect_name)
    @pytest.mark.parametrize("streamed", [True, False])
    async def test_before_the_first_token_is_a_status_and_costs_nothing(
        self, service: Service, dialect: Dialect, *, streamed: bool
    ) -> None:
        for fields in ({"die_after": 0}, {"error_after": 0}):
            service.engine.steer(**fields)
            answer = await service.post(dialect.path(service), dialect.body(service, stream=streamed))
            if answer.status == 200:  # the engine's headers were out already
                assert streamed
                assert b"[DONE]" not in answer.body
            else:
                assert 500 <= answer.status < 600, answer.body
                assert dialect.error_of(answer.json())
        service.engine.steer()
        assert (await service.post(dialect.path(service), dialect.body(service))).status == 200
        await service.oracle(rows=3)
        rows = await service.records()
        assert [row["outcome"] for row in rows] == ["finished", "upstream_failed", "upstream_failed"]
        assert [row["cost_nano"] for row in rows[1:]] == [0, 0]

    async def test_an_end_without_a_finish_reason_is_no_success(self, service: Service) -> None:
        service.engine.steer(
            raw=(b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n',)
        )
        answer = await service.post(CHAT.path(service), CHAT.body(service, stream=True))
        assert answer.status >= 500 or b"[DONE]" not in answer.body
        await service.oracle(rows=1)
        assert (await service.records())[0]["outcome"] == "upstream_failed"

    @pytest.mark.parametrize("garbage", [b"data: {\n\n", b"data: 7\n\n", b"data: null\n\n", b"\xff\xfe\n\n"])
    async def test_garbage_is_the_engines_failure(self, service: Service, garbage: bytes) -> None:
        service.engine.steer(raw=(garbage,))
        answer = await service.post(CHAT.path(service), CHAT.body(service, stream=True))
        assert answer.status >= 500 or b"error" in answer.body
        assert b"[DONE]" not in answer.body
        await service.oracle(rows=1)
        assert (await service.records())[0]["cost_nano"] == 0

    async def test_a_gateway_goes_on_after_its_engine_has_failed(self, service: Service) -> None:
        service.engine.steer(die_after=3)
        await service.post(CHAT.path(service), CHAT.body(service, stream=True))
        service.engine.steer()
        await eventually(lambda: service.services.fleet.of(service.model).up, what="a replica that answers")
        answer = await service.post(CHAT.path(service), CHAT.body(service))
        assert answer.status == 200
