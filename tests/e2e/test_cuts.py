"""The engine's bytes cut at every position, for every kind of stream: what the client reads is the same to the byte.

Slow readers, too: who takes nothing holds its engine back, and fills no memory here.
"""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tests.doubles.waiting import eventually
from tests.e2e.dialects import ACCOUNT_CHAT, CHAT, COMPLETIONS, RUN
from tests.e2e.service import Service

SAID = '北🙂"\\'
# Cuts lie this far apart in one answer; as many answers as that cut at every position.
STRIDE = 11
# What differs between two answers to the same question: ids, seconds, and padding of random length.
_VARIES = re.compile(
    rb'[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}|"created(_at)?":\d+|"p":"[a-z0-9]*"|call_[0-9a-f]+'
)
KINDS: dict[str, tuple[Callable[[Service], str], Callable[[Service], dict[str, Any]]]] = {
    "chat": (CHAT.path, lambda service: CHAT.body(service, stream_options={"include_usage": True})),
    "chat under an account": (ACCOUNT_CHAT.path, ACCOUNT_CHAT.body),
    "two choices": (CHAT.path, lambda service: CHAT.body(service, n=2, stream_options={"include_usage": True})),
    "completions": (COMPLETIONS.path, COMPLETIONS.body),
    "run": (RUN.path, RUN.body),
    "responses": (lambda _: "/v1/responses", lambda service: {"model": service.model, "input": "hi"}),
}


async def read(service: Service, kind: str) -> bytes:
    path, body = KINDS[kind]
    answer = await service.post(path(service), body(service) | {"stream": True})
    assert answer.status == 200, answer.body
    steady = _VARIES.sub(b"", answer.body)
    # Two choices are read side by side: their order among each other is nobody's promise.
    return b"\n\n".join(sorted(steady.split(b"\n\n"))) if kind == "two choices" else steady


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cut_at_any_position_changes_no_byte(service: Service, kind: str) -> None:
    service.engine.steer(text=SAID, tokens=2)
    golden = await read(service, kind)
    assert golden.count(orjson.dumps(SAID)[1:-1]) >= 2
    length = max(len(sent) for sent in service.engine.sent.values())
    for first in range(1, STRIDE + 1):
        service.engine.steer(text=SAID, tokens=2, cut=tuple(range(first, length, STRIDE)))
        assert await read(service, kind) == golden, first
    await service.oracle(rows=STRIDE + 1)


async def test_who_reads_nothing_holds_its_engine_back(service: Service) -> None:
    service.engine.steer(text="x" * 16_000)  # in all, more than the sockets between them hold
    body = CHAT.body(service, stream=True, max_tokens=2_000)
    async with service.open_stream(CHAT.path(service), body) as response:
        assert response.status == 200
        await response.content.read(1)
        await asyncio.sleep(2)  # nothing is waited for: this is how long nothing is read
        assert max(service.engine.produced.values()) < 1_500
        assert service.engine.live
    await eventually(lambda: not service.engine.live, what="an engine that has stopped")
    await service.oracle(rows=1)
