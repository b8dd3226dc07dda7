"""A page of the engine's cache changes hands under a request: an outcome of its own, an error, and nothing to pay."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from backends.page_tags import ABORT_MESSAGE
from tests.backends.local.faulty_server import FAULTY_TOKENS
from tests.doubles.script import Refusal, Script
from tests.e2e.dialects import CHAT, DIALECTS, Dialect
from tests.e2e.local_service import running_local_service
from tests.e2e.service import Service

ERROR = {"object": "error", "message": ABORT_MESSAGE, "type": "INTERNAL_SERVER_ERROR", "param": None, "code": 500}


def said_by_an_engine(*, stream: bool) -> Script:
    """What SGLang sends when the plugin stops a request: in the stream, or instead of the answer."""
    if stream:
        return Script(raw=(b"data: " + orjson.dumps({"error": ERROR}) + b"\n\n", b"data: [DONE]\n\n"))
    return Script(refuse=Refusal(500, orjson.dumps(ERROR)))


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_an_outcome_of_its_own_and_free(service: Service, dialect: Dialect, *, stream: bool) -> None:
    service.engine.script = said_by_an_engine(stream=stream)
    answer = await service.post(dialect.path(service), dialect.body(service, stream=stream))
    assert answer.status == 502
    assert ABORT_MESSAGE.encode() not in answer.body, "an engine's words are for the log"
    await service.oracle(rows=1)
    [row] = await service.records()
    assert (row["outcome"], row["code"], row["cost_nano"]) == ("integrity_abort", "integrity_abort", 0)


async def test_another_error_500_is_the_engine_s_failure(service: Service) -> None:
    service.engine.script = Script(refuse=Refusal(500, orjson.dumps(ERROR | {"message": "out of memory"})))
    await service.post(CHAT.path(service), CHAT.body(service))
    [row] = await service.records()
    assert (row["outcome"], row["cost_nano"]) == ("upstream_failed", 0)


async def test_text_that_says_so_is_only_text(service: Service) -> None:
    service.engine.script = Script(text=ABORT_MESSAGE)
    for stream in (False, True):
        answer = await service.post(CHAT.path(service), CHAT.body(service, stream=stream))
        assert answer.status == 200
    assert {row["outcome"] for row in await service.records()} == {"finished"}


@pytest.fixture
async def faulty(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Service]:
    """A gateway in front of the local engine, whose book-keeping has a bug."""
    async with running_local_service(
        tmp_path / "home", checkpoint, module="tests.backends.local.faulty_server"
    ) as service:
        yield service


@pytest.mark.engine
async def test_the_local_engine_stops_the_request_alone_and_its_neighbours_say_what_they_always_say(
    faulty: Service,
) -> None:
    async def ask(tokens: int, *, stream: bool = False) -> bytes:
        body = CHAT.body(faulty, max_tokens=tokens, temperature=0, stream=stream)
        answer = await faulty.post(CHAT.path(faulty), body)
        return answer.body if answer.status == 200 else str(answer.status).encode()

    def text(body: bytes) -> str:
        return str(orjson.loads(body)["choices"][0]["message"]["content"])

    alone = text(await ask(60))
    *others, whole, streamed = await asyncio.gather(
        *(ask(60) for _ in range(3)), ask(FAULTY_TOKENS), ask(FAULTY_TOKENS, stream=True)
    )
    assert [text(other) for other in others] == [alone] * 3
    assert whole == b"502"
    shown = [event.removeprefix(b"data: ") for event in streamed.split(b"\n\n") if event]
    assert b'"error"' in shown[-1]
    assert b"[DONE]" not in streamed
    assert alone.startswith(CHAT.said(shown[:-1]))
    await faulty.oracle(rows=6)
    outcomes = [(row["outcome"], row["cost_nano"] > 0) for row in await faulty.records()]
    assert sorted(outcomes) == [("finished", True)] * 4 + [("integrity_abort", False)] * 2
