"""What decode takes from whoever answers at prefill's address, and what it refuses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from backends.local.pair.fetch import Fetches
from backends.local.pair.handover import DECODE_LOST, PREFILL_LOST, Handover, checksum, digest
from backends.local.pair.offer import Rooms
from backends.local.sequence import Bootstrap, Failure, TokenLogprob
from tests.doubles.waiting import eventually
from tests.engines import free_port

PROMPT = [5, 6, 7]
DATA = bytearray(b"pages" * 100)
LAYOUT = "two layers"


class Heard:
    """The worker: what it was told, in order."""

    def __init__(self) -> None:
        self.received: dict[str, Handover] = {}
        self.failed: dict[str, Failure] = {}
        self.joined: list[str] = []
        self.sent: list[str] = []

    def decode_joined(self, rid: str) -> None:
        self.joined.append(rid)

    def pages_sent(self, rid: str) -> None:
        self.sent.append(rid)

    def receive(self, rid: str, handover: Handover) -> None:
        self.received[rid] = handover

    def fail(self, rid: str, failure: Failure) -> None:
        self.failed[rid] = failure


def handover(**changes: Any) -> Handover:
    fields: dict[str, Any] = {
        "prompt_digest": digest(PROMPT),
        "layout": LAYOUT,
        "first_token": 9,
        "logprob": TokenLogprob(9, -0.5, ((9, -0.5), (8, -1.0))),
        "cached_tokens": 2,
        "data": DATA,
        "checksum": checksum(DATA),
    }
    return Handover(**(fields | changes))


@asynccontextmanager
async def halves() -> AsyncIterator[tuple[Rooms, Heard, Fetches, Heard, int]]:
    rooms, prefill, fetches, decode, port = (
        Rooms(LAYOUT),
        Heard(),
        Fetches(LAYOUT, size_max=len(DATA)),
        Heard(),
        free_port(),
    )
    rooms.attach(prefill)
    fetches.attach(decode)
    server = await rooms.listen("127.0.0.1", port)
    yield rooms, prefill, fetches, decode, port
    await fetches.close()
    server.close()
    await rooms.close()


async def test_what_prefill_hands_in_is_what_decode_gets() -> None:
    async with halves() as (rooms, prefill, fetches, decode, port):
        rooms.open(1, "a", digest(PROMPT))
        fetches.start("a", Bootstrap("127.0.0.1", port, 1), PROMPT)
        await eventually(lambda: prefill.joined == ["a"], what="decode")
        rooms.hand_in("a", handover())
        await eventually(lambda: prefill.sent == ["a"] and "a" in decode.received, what="the pages")
        assert decode.received["a"] == handover()
        assert decode.received["a"].belongs_to(PROMPT, LAYOUT, len(DATA))
        rooms.ended("a")
        fetches.ended("a")


async def test_decode_may_come_before_the_room_is_open() -> None:
    async with halves() as (rooms, prefill, fetches, decode, port):
        fetches.start("a", Bootstrap("127.0.0.1", port, 1), PROMPT)
        fetches.start("b", Bootstrap("127.0.0.1", port, 2), PROMPT)
        await asyncio.sleep(0)
        rooms.open(1, "a", digest(PROMPT))
        await eventually(lambda: prefill.joined == ["a"], what="decode")
        rooms.hand_in("a", handover())
        await eventually(lambda: "a" in decode.received, what="the pages")
        assert not decode.failed
        rooms.ended("a")


async def test_a_request_that_ends_at_prefill_ends_at_decode() -> None:
    async with halves() as (rooms, prefill, fetches, decode, port):
        rooms.open(1, "a", digest(PROMPT))
        fetches.start("a", Bootstrap("127.0.0.1", port, 1), PROMPT)
        await eventually(lambda: prefill.joined == ["a"], what="decode")
        rooms.ended("a")
        await eventually(lambda: decode.failed == {"a": PREFILL_LOST}, what="the end")
        assert not prefill.failed
        rooms.open(1, "again", digest(PROMPT))
        rooms.ended("again")


async def test_a_request_that_ends_at_decode_ends_at_prefill() -> None:
    async with halves() as (rooms, prefill, fetches, decode, port):
        rooms.open(1, "a", digest(PROMPT))
        fetches.start("a", Bootstrap("127.0.0.1", port, 1), PROMPT)
        await eventually(lambda: prefill.joined == ["a"], what="decode")
        fetches.ended("a")
        await eventually(lambda: prefill.failed == {"a": DECODE_LOST}, what="the end")
        assert not decode.failed
        rooms.ended("a")


async def test_a_room_is_for_one_prompt_one_visitor_and_one_shape_of_cache() -> None:
    async with halves() as (rooms, prefill, fetches, decode, port):
        rooms.open(1, "a", digest(PROMPT))
        fetches.start("other prompt", Bootstrap("127.0.0.1", port, 1), [1])
        await eventually(lambda: "other prompt" in decode.failed, what="a refusal")
        fetches.start("a", Bootstrap("127.0.0.1", port, 1), PROMPT)
        await eventually(lambda: prefill.joined == ["a"], what="decode")
        fetches.start("second", Bootstrap("127.0.0.1", port, 1), PROMPT)
        await eventually(lambda: "second" in decode.failed, what="a refusal")
        strange = Fetches("three layers", size_max=len(DATA))
        strange.attach(decode)
        strange.start("strange", Bootstrap("127.0.0.1", port, 1), PROMPT)
        await eventually(lambda: "strange" in decode.failed, what="a refusal")
        rooms.hand_in("a", handover())
        await eventually(lambda: "a" in decode.received, what="the pages")
        rooms.ended("a")


Answer = Callable[[dict[str, Any]], bytes]


def header(hello: dict[str, Any], **changes: Any) -> bytes:
    said = handover().header(hello["fence"]).model_dump() | changes
    return orjson.dumps({"header": said}) + b"\n"


@pytest.mark.parametrize(
    "answer",
    [
        lambda hello: b"",
        lambda hello: b"{}\n",
        lambda hello: b"[]\n",
        lambda hello: b"no json\n",
        lambda hello: b"x" * 100_000,
        lambda hello: b'{"header":{}}\n',
        lambda hello: b'{"refused":"for a reason"}\n',
        lambda hello: header(hello, fence="of an earlier call") + DATA,
        lambda hello: header(hello, size=len(DATA) + 1) + DATA + b"x",
        lambda hello: header(hello, size=-1),
        lambda hello: header(hello) + DATA[:-1],
        lambda hello: b'{"alive":true}\n',
    ],
)
async def test_an_answer_that_is_not_of_the_protocol_is_a_lost_prefill(answer: Answer) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(orjson.loads(await reader.readline())["hello"]))
        writer.write_eof()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port := free_port())
    fetches, decode = Fetches(LAYOUT, size_max=len(DATA)), Heard()
    fetches.attach(decode)
    fetches.start("a", Bootstrap("127.0.0.1", port, 1), PROMPT)
    await eventually(lambda: decode.failed == {"a": PREFILL_LOST}, what="a refusal")
    assert not decode.received
    await fetches.close()
    server.close()


def test_pages_that_are_not_whole_or_not_this_prompt_s_do_not_belong_to_it() -> None:
    flipped = bytearray(DATA)
    flipped[17] ^= 1
    assert handover().belongs_to(PROMPT, LAYOUT, len(DATA))
    assert not handover(data=flipped).belongs_to(PROMPT, LAYOUT, len(DATA))
    assert not handover().belongs_to([*PROMPT, 1], LAYOUT, len(DATA))
    assert not handover().belongs_to(PROMPT, "other", len(DATA))
    assert not handover().belongs_to(PROMPT, LAYOUT, len(DATA) - 1)
