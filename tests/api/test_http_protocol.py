"""Real sockets: heads that don't end, clients of HTTP/1.0, and a client that leaves while its request is worked on."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from api.answer_writer import AnswerWriter
from api.departure import ClientGone, ClientWatch, Departure
from api.http_protocol import HttpProtocol
from tests.doubles.waiting import eventually

HEAD = b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n"


class Application:
    """/whole answers at once, /parts without a length, /waits until its client leaves; what became of it is noted."""

    def __init__(self) -> None:
        self.waiting = 0
        self.ended: list[str] = []
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/waits":
            await receive()
            await self._wait(scope["state"]["departure"], receive)
            return
        body = b"ab" if scope["path"] == "/whole" else b""
        headers = [(b"content-length", b"2")] if body else [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"one ", b"two"):
            if not body:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _wait(self, departure: Departure, receive: Receive) -> None:
        self.waiting += 1
        before = len(asyncio.all_tasks())
        try:
            async with ClientWatch(receive, departure=departure):
                assert len(asyncio.all_tasks()) == before
                await asyncio.Event().wait()
        except ClientGone:
            self.ended.append("gone")


@asynccontextmanager
async def serving(app: ASGIApp, monkeypatch: pytest.MonkeyPatch, *, head_s: float) -> AsyncIterator[int]:
    monkeypatch.setattr(HttpProtocol, "head_s_max", head_s)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=HttpProtocol, ws="none", lifespan="off", log_config=None))
    running = asyncio.create_task(server._serve(sockets=[listener]))
    await eventually(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def answer_to(port: int, *pieces: bytes) -> bytes:
    """All that comes until the server closes."""
    reader, writer = await connect(port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def flooded(port: int, begin: bytes, piece: bytes) -> tuple[int, bytes]:
    """How many bytes were taken until the server had enough, of at most a thousand pieces; and what it said then."""
    reader, writer = await connect(port)
    sent = 0
    async with asyncio.timeout(30):
        writer.write(begin)
        with suppress(ConnectionError):
            while sent < 1_000 * len(piece) and not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
                sent += len(piece)
        answer = b""
        with suppress(ConnectionError):
            answer = await reader.read()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return sent, answer


class TestHeads:
    async def test_a_head_that_does_not_end_is_refused_at_its_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with serving(Application(), monkeypatch, head_s=0.1) as port:
            answer = await answer_to(port, HEAD[:20])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer

    async def test_a_trickle_of_header_lines_wins_no_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with serving(Application(), monkeypatch, head_s=0.3) as port:
            reader, writer = await connect(port)
            writer.write(HEAD[:-2])
            reading = asyncio.create_task(reader.read())
            async with asyncio.timeout(10):
                while not reading.done():
                    with suppress(ConnectionError):
                        writer.write(b"x-more: 1\r\n")
                    await asyncio.sleep(0.02)
            # Whoever still writes into a closed connection may see it reset before the answer.
            with suppress(ConnectionError):
                assert (await reading).startswith(b"HTTP/1.1 408 ")
            writer.close()

    @pytest.mark.parametrize("piece", [b"a" * 10_000, b"a: 1\r\n" * 2_000], ids=["in one line", "in many lines"])
    async def test_a_head_that_grows_without_end_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, piece: bytes
    ) -> None:
        async with serving(Application(), monkeypatch, head_s=30) as port:
            sent, answer = await flooded(port, HEAD[:-2] + b"x-more: ", piece)
        assert sent < 1_000 * len(piece)
        assert answer.startswith(b"HTTP/1.1 431 ") or not answer  # reset under whoever still wrote

    async def test_so_are_lines_after_a_body_that_grow_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        head = b"POST /waits HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx-more: "
        async with serving(Application(), monkeypatch, head_s=30) as port:
            sent, _ = await flooded(port, head, b"a" * 10_000)
        assert sent < 1_000 * 10_000

    async def test_a_head_of_a_browser_with_many_cookies_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Application()
        app.may_end.set()
        async with serving(app, monkeypatch, head_s=30) as port:
            close = b"connection: close\r\ncookie: " + b"a" * 30_000 + b"\r\n\r\n"
            assert (await answer_to(port, HEAD[:-2], close[:20_000], close[20_000:])).startswith(b"HTTP/1.1 200 ")

    async def test_a_connection_that_says_nothing_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with serving(Application(), monkeypatch, head_s=0.1) as port:
            assert await answer_to(port) == b""

    async def test_a_head_sent_ahead_does_not_end_the_answer_before_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Application()
        async with serving(app, monkeypatch, head_s=0.1) as port:
            reader, writer = await connect(port)
            writer.write(HEAD + HEAD[:20])
            await asyncio.sleep(0.4)  # several deadlines of the second head
            app.may_end.set()
            async with asyncio.timeout(10):
                answer = await reader.read()
            writer.close()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"\r\n\r\nab" in answer
        assert b" 408 " in answer[20:]

    async def test_an_answer_may_take_longer_than_a_head(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Application()
        async with serving(app, monkeypatch, head_s=0.05) as port:
            reader, writer = await connect(port)
            writer.write(HEAD[:10])
            await writer.drain()
            writer.write(HEAD[10:])
            await asyncio.sleep(0.2)
            app.may_end.set()
            async with asyncio.timeout(10):
                assert (await reader.readuntil(b"ab")).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()


class TestOldClients:
    async def test_a_stream_ends_with_its_connection_and_has_no_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Application()
        app.may_end.set()
        async with serving(app, monkeypatch, head_s=5) as port:
            answer = await answer_to(port, b"GET /parts HTTP/1.0\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert body == b"one two"
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head

    async def test_a_whole_answer_keeps_its_length(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Application()
        app.may_end.set()
        async with serving(app, monkeypatch, head_s=5) as port:
            answer = await answer_to(port, b"GET /whole HTTP/1.0\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert (b"content-length: 2" in head, body) == (True, b"ab")

    async def test_newer_clients_still_get_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Application()
        app.may_end.set()
        async with serving(app, monkeypatch, head_s=5) as port:
            answer = await answer_to(port, b"GET /parts HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer.endswith(b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n")


class TestAnswers:
    """What goes out in a single write is what uvicorn would have written."""

    async def test_a_whole_one_keeps_its_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with serving(Saying([(b"content-length", b"2"), (b"x-two", b"2")], b"ab"), monkeypatch, head_s=5) as port:
            reader, writer = await connect(port)
            for _ in range(2):
                writer.write(HEAD)
                async with asyncio.timeout(10):
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert await reader.readexactly(2) == b"ab"
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                lines = set(head.split(b"\r\n"))
                assert {b"content-length: 2", b"x-two: 2"} <= lines
                assert b"connection: close" not in lines
            writer.close()

    @pytest.mark.parametrize(
        "header", [(b"x-one\r\nx-two", b"2"), (b"x-one", b"1\r\nx-two: 2"), (b"x one", b"1"), (b"x-one", b"\0")]
    )
    async def test_nobody_writes_a_line_of_its_head(
        self, monkeypatch: pytest.MonkeyPatch, header: tuple[bytes, bytes]
    ) -> None:
        app = Saying([(b"content-length", b"2"), header], b"ab")
        async with serving(app, monkeypatch, head_s=5) as port:
            answer = await answer_to(port, HEAD)
        assert b"x-two" not in answer
        assert not answer.startswith(b"HTTP/1.1 200 ")

    async def test_names_are_written_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Saying([(b"Content-Length", b"2"), (b"X-One", b"1"), (b"connection", b"close")], b"ab")
        async with serving(app, monkeypatch, head_s=5) as port:
            answer = await answer_to(port, HEAD)
        assert b"\r\nx-one: 1\r\n" in answer
        assert answer.endswith(b"\r\n\r\nab")

    async def test_a_large_one_is_not_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        copied: list[int] = []
        together = AnswerWriter._whole

        def noted(self: AnswerWriter, start: dict[str, Any], body: bytes) -> bytes | None:
            whole = together(self, start, body)
            copied.append(0 if whole is None else len(body))
            return whole

        monkeypatch.setattr(AnswerWriter, "_whole", noted)
        for size in (1_000, 2 << 20):
            app = Saying([(b"content-length", b"%d" % size)], b"x" * size)
            async with serving(app, monkeypatch, head_s=5) as port:
                reader, writer = await connect(port)
                writer.write(HEAD)
                async with asyncio.timeout(10):
                    await reader.readuntil(b"\r\n\r\n")
                    assert await reader.readexactly(size) == b"x" * size
                writer.close()
        assert copied == [1_000, 0]

    @pytest.mark.parametrize("body", [b"abc", b"a"])
    async def test_a_body_of_another_length_breaks_the_connection(
        self, monkeypatch: pytest.MonkeyPatch, body: bytes
    ) -> None:
        async with serving(Saying([(b"content-length", b"2")], body), monkeypatch, head_s=5) as port:
            answer = await answer_to(port, HEAD)
        assert answer.partition(b"\r\n\r\n")[2] in {b"", b"a"}

    @pytest.mark.parametrize("fails", [True, False])
    async def test_an_application_that_ends_before_its_body_is_a_server_error_and_not_a_wait(
        self, monkeypatch: pytest.MonkeyPatch, *, fails: bool
    ) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            del scope, receive
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            if fails:
                raise OSError

        async with serving(app, monkeypatch, head_s=5) as port:
            answer = await answer_to(port, HEAD)
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert answer.endswith(b"\r\n\r\nInternal Server Error")

    async def test_who_asks_for_a_head_gets_no_body(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with serving(Saying([(b"content-length", b"2")], b"ab"), monkeypatch, head_s=5) as port:
            answer = await answer_to(port, b"HEAD / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"content-length: 2" in answer
        assert answer.endswith(b"\r\n\r\n")

    async def test_who_wants_to_close_is_told_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with serving(Saying([(b"content-length", b"2")], b"ab"), monkeypatch, head_s=5) as port:
            answer = await answer_to(port, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"\r\n\r\nab")


class Saying:
    """One answer, whole, to whatever comes."""

    def __init__(self, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._headers = headers
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})


class TestBodies:
    async def test_whether_one_has_arrived_is_known_without_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[bytes, bool]] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            more = True
            while more:
                arrived = scope["state"]["body_arrived"]()
                message = await receive()
                more = message["more_body"]
                seen.append((message["body"], arrived))
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\n"
        async with serving(app, monkeypatch, head_s=5) as port:
            await answer_to(port, head + b"abcd")
            _, writer = await connect(port)
            writer.write(head + b"ab")
            await eventually(lambda: len(seen) == 2)
            writer.write(b"cd")
            await eventually(lambda: len(seen) == 3)
            writer.close()
        assert seen == [(b"abcd", True), (b"ab", False), (b"cd", False)]


class TestOffersOfAnotherProtocol:
    async def test_are_passed_over_and_the_body_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bodies: list[bytes] = []

        async def app(_scope: Scope, receive: Receive, send: Send) -> None:
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message["body"], message["more_body"]
            bodies.append(body)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        def head(length: int, connection: bytes) -> bytes:
            offer = b"connection: Upgrade, HTTP2-Settings%b\r\nUpgrade: h2c\r\nHTTP2-Settings: AAE" % connection
            return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n\r\n" % (length, offer)

        tricky = b"a\r\nUpgrade: h2c\r\n\r\nb"
        async with serving(app, monkeypatch, head_s=30) as port:
            reader, writer = await connect(port)
            writer.write(head(len(tricky), b"") + tricky)
            await eventually(lambda: len(bodies) == 1)
            writer.write(head(len(tricky), b", close"))
            writer.write(tricky[:1])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(tricky[1:])
            async with asyncio.timeout(30):
                answers = await reader.read()
            writer.close()
        assert bodies == [tricky, tricky]
        assert answers.count(b"HTTP/1.1 204 ") == 2


class TestDepartures:
    async def test_one_is_told_without_a_task_that_listens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Application()
        async with serving(app, monkeypatch, head_s=5) as port:
            _, writer = await connect(port)
            writer.write(b"POST /waits HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            await eventually(lambda: app.waiting == 1)
            writer.close()
            await eventually(lambda: app.ended == ["gone"])

    async def test_a_wait_that_begins_after_it_does_not_begin(self) -> None:
        departure = Departure()
        departure.tell()
        with pytest.raises(ClientGone):
            async with ClientWatch(_nothing, departure=departure):
                pytest.fail("nobody is there")

    async def test_work_that_ended_first_is_left_alone(self) -> None:
        departure = Departure()
        async with ClientWatch(_nothing, departure=departure):
            pass
        departure.tell()
        await asyncio.sleep(0)


async def _nothing() -> dict[str, str]:
    raise AssertionError("nobody listens here")
