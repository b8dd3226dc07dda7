"""Token streams end exactly once, whoever leaves, stalls or fails; silence is filled with comments."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import orjson
import pytest
import structlog

from api.sse import DONE, EventStream, data_frame
from backends.errors import EngineBroke
from billing.errors import BillingUnavailable
from gateway.errors import GenerationFailed
from gateway.stream import Stream
from tests.api.exchange import Exchange, exchange
from tests.fakes import FakeStream, until


async def frames_of(stream: FakeStream) -> AsyncIterator[bytes]:
    async for payload in stream:
        yield data_frame(payload)
    yield DONE


def stream_exchange(stream: FakeStream, **bounds: float) -> Exchange:
    answer = EventStream(
        cast("Stream", stream), frames_of(stream), request_id="id-1", headers={"x-more": "1"}, **bounds
    )

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()  # the body, which a route has read by then
        await answer(scope, receive, send)

    return exchange(app, "GET", "/")


async def test_frames_go_out_as_they_come_and_the_stream_is_closed_once() -> None:
    stream = FakeStream(b"1", b"2")
    done = await stream_exchange(stream).run()
    assert done.chunks == [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    assert done.complete
    assert stream.closed == 1


@pytest.mark.parametrize("text", ["a\u2028b\u2029c\u0085d", "grüße – “alles”"], ids=["line ends", "others"])
async def test_a_text_with_line_ends_of_unicode_stays_in_one_line(text: str) -> None:
    chunk = orjson.dumps({"content": text})
    done = await stream_exchange(FakeStream(chunk)).run()
    lines = done.body.decode().splitlines()
    assert [line for line in lines if line] == [lines[0], "data: [DONE]"]
    assert orjson.loads(lines[0].removeprefix("data: ")) == {"content": text}


async def test_headers_keep_proxies_from_buffering() -> None:
    done = await stream_exchange(FakeStream()).run()
    assert done.headers["content-type"].startswith("text/event-stream")
    assert done.headers["cache-control"] == "no-cache"
    assert done.headers["x-accel-buffering"] == "no"
    assert done.headers["x-more"] == "1"
    assert "content-length" not in done.headers


async def test_a_failure_is_an_error_frame_without_done() -> None:
    failed = GenerationFailed("The engine failed.")
    failed.__cause__ = EngineBroke("cut")
    stream = FakeStream(b"1", error=failed)
    done = await stream_exchange(stream).run()
    assert done.chunks[0] == b"data: 1\n\n"
    assert orjson.loads(done.chunks[1].removeprefix(b"data: "))["error"]["code"] == "generation_failed"
    assert len(done.chunks) == 2
    assert done.complete
    assert stream.closed == 1


async def test_a_departed_client_closes_the_stream() -> None:
    stream = FakeStream(b"1", hangs=True)
    running = stream_exchange(stream).start()
    await running.until_sent(1)
    running.leave()
    await running.ended()
    assert stream.closed == 1
    assert not running.complete


async def test_a_client_that_leaves_before_the_first_frame_closes_the_stream() -> None:
    stream = FakeStream(hangs=True)
    running = stream_exchange(stream).start()
    await until(lambda: running.status == 200)
    running.leave()
    await running.ended()
    assert stream.closed == 1


async def test_a_server_that_stops_closes_the_stream() -> None:
    stream = FakeStream(b"1", hangs=True)
    running = stream_exchange(stream).start()
    await running.until_sent(1)
    assert running.task is not None
    running.task.cancel()
    await asyncio.wait([running.task])
    await until(lambda: stream.closed == 1)


async def test_a_settlement_that_fails_after_the_end_is_logged_and_hurts_nobody() -> None:
    stream = FakeStream(b"1", close_error=BillingUnavailable("The disk is full."))
    with structlog.testing.capture_logs() as logs:
        done = await stream_exchange(stream).run()
    assert done.complete
    assert [line["error"] for line in logs if line["log_level"] == "error"] == ["BillingUnavailable"]


async def test_no_comment_overtakes_the_head() -> None:
    running = stream_exchange(FakeStream(b"1"), heartbeat_s=0.01, stalled_s=5)
    running.stop_reading()
    running.start()
    await asyncio.sleep(0.05)  # several heartbeats long
    running._reading.set()
    await running.ended()
    assert running.chunks[0] == b"data: 1\n\n"


async def test_silence_is_filled_with_comments() -> None:
    running = stream_exchange(FakeStream(b"1", hangs=True), heartbeat_s=0.02).start()
    await running.until_sent(4)
    assert running.chunks == [b"data: 1\n\n", *[b": ping\n\n"] * 3]
    running.leave()
    await running.ended()


async def test_a_talking_stream_gets_no_comments() -> None:
    stream = FakeStream(*[b"%d" % number for number in range(200)])
    done = await stream_exchange(stream, heartbeat_s=5).run()
    assert b": ping" not in done.body


async def test_a_slow_reader_holds_the_stream_back() -> None:
    stream = FakeStream(b"1", b"2", b"3")
    running = stream_exchange(stream)
    running.stop_reading()
    running.start()
    await asyncio.sleep(0)
    assert len(stream._payloads) >= 2, "nothing is read ahead of the reader"
    running._reading.set()
    await running.ended()
    assert len(running.chunks) == 4


async def test_a_reader_that_takes_nothing_for_long_is_given_up() -> None:
    stream = FakeStream(b"1", b"2", b"3", hangs=True)
    running = stream_exchange(stream, heartbeat_s=0.02, stalled_s=0.05).start()
    await running.until_sent(3)
    running.stop_reading()
    await running.ended()
    assert stream.closed == 1


async def test_a_stalled_frame_is_given_up_too() -> None:
    stream = FakeStream(b"1", b"2")
    running = stream_exchange(stream, heartbeat_s=0.02, stalled_s=0.05)
    running.stop_reading()
    running.start()
    await running.ended()
    assert stream.closed == 1
