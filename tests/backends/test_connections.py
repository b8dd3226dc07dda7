"""The wire to an engine, against a real server that sends what it is told, byte by byte if need be."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from backends import connections
from backends.client import EngineAnswer, EngineClient
from backends.connections import EnginePool, open_session
from backends.errors import EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable
from backends.settings import BackendSettings
from tests.doubles.waiting import eventually
from tests.engines import free_port

WHOLE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"text":""}'
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'

Reply = Callable[["Peer", bytes], Awaitable[None]]


class Peer:
    """The server's side of one connection: `write` at once, `close`, and what it was asked so far."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.asked: list[bytes] = []

    async def write(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    def close(self) -> None:
        self.writer.close()


class Server:
    """Answers every request with `reply`; knows all connections that were ever made."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.peers: list[Peer] = []
        self.serving = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(writer)
        self.peers.append(peer)
        self.serving += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                peer.asked.append(head + await reader.readexactly(length))
                await self.reply(peer, peer.asked[-1])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self.serving -= 1


# Of tests that wait for a bound, and of all others: they may not be given a core for a while.
BRIEF = BackendSettings(silence_s_max=1, answer_s_max=1)
PATIENT = BackendSettings(silence_s_max=30, answer_s_max=60)


@asynccontextmanager
async def serving(
    reply: Reply, settings: BackendSettings = PATIENT
) -> AsyncIterator[tuple[Server, EnginePool, EngineClient]]:
    server, url = Server(reply), f"http://127.0.0.1:{(port := free_port())}/v9"
    async with open_session() as session:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", port)
        async with listening:
            client = EngineClient(url, session, settings)
            yield server, session.pool(url), client
            await session.close()
            await eventually(lambda: not server.serving)


def replying(*parts: bytes) -> Reply:
    return lambda peer, _: peer.write(*parts)


async def ask(pool: EnginePool, path: str = "/x") -> tuple[int, bytes]:
    return await pool.exchange(pool.request("GET", path), within_s=30, connect_s=30)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def silent(peer: Peer, request: bytes) -> None:
    """It takes the request and says nothing."""


async def is_waited_for(answer: EngineAnswer) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await answer.fields()


class TestReuse:
    async def test_a_connection_serves_one_exchange_after_the_other(self) -> None:
        async with serving(replying(WHOLE)) as (server, pool, _):
            assert [await ask(pool) for _ in range(3)] == [(200, b'{"text":""}')] * 3
            assert len(server.peers) == 1

    async def test_exchanges_at_once_have_a_connection_each(self) -> None:
        async with serving(replying(WHOLE)) as (server, pool, _):
            await asyncio.gather(*(ask(pool) for _ in range(4)))
            assert len(server.peers) == 4

    async def test_some_are_made_ahead_and_used_before_new_ones(self) -> None:
        async with serving(replying(WHOLE)) as (server, pool, _):
            for _ in range(2):
                await pool.keep_spare(3, within_s=30)
                await eventually(lambda: len(server.peers) == 3)
            await asyncio.gather(*(ask(pool) for _ in range(3)))
            assert len(server.peers) == 3

    async def test_one_that_the_server_wants_closed_is_not_used_again(self) -> None:
        async with serving(replying(WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))) as (server, pool, _):
            await ask(pool)
            await ask(pool)
            assert len(server.peers) == 2

    async def test_one_that_the_server_has_closed_is_not_used_again(self) -> None:
        async with serving(replying(WHOLE)) as (server, pool, _):
            await ask(pool)
            server.peers[0].close()
            await eventually(lambda: not pool._idle)
            await ask(pool)
            assert len(server.peers) == 2

    async def test_one_that_has_been_idle_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "_IDLE_S_MAX", 0.05)
        async with serving(replying(WHOLE)) as (_, pool, _):
            await ask(pool)
            assert len(pool._open) == 1
            await eventually(lambda: not pool._open)

    async def test_one_on_which_the_server_speaks_unasked_is_dropped(self) -> None:
        async with serving(replying(WHOLE)) as (server, pool, _):
            await ask(pool)
            await server.peers[0].write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
            await eventually(lambda: not pool._open)

    async def test_an_exchange_that_is_given_up_takes_its_connection_along(self) -> None:
        async with serving(replying(CHUNKED)) as (server, pool, _):
            asking = asyncio.create_task(ask(pool))
            await eventually(lambda: bool(server.peers and server.peers[0].asked))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: not pool._open)


class TestRequests:
    async def test_a_request_names_the_host_the_whole_path_and_its_length(self) -> None:
        async with serving(replying(WHOLE)) as (server, _, client):
            answer = await client.ask("/v1/completions", b'{"a":1}')
            assert await answer.fields() == {"text": ""}
            answer.close()
            head, _, body = server.peers[0].asked[0].partition(b"\r\n\r\n")
        assert head.splitlines()[0] == b"POST /v9/v1/completions HTTP/1.1"
        assert b"Content-Length: 7" in head.splitlines()
        assert head.count(b"Host: 127.0.0.1:") == 1
        assert body == b'{"a":1}'

    def test_a_name_and_password_in_the_url_become_a_header(self) -> None:
        head = EnginePool("http://me:p%40ss@engine:81/").request("GET", "/health")
        assert b"Host: engine:81\r\n" in head
        assert b"Authorization: Basic bWU6cEBzcw==\r\n" in head


class TestAnswers:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
    async def test_an_answer_may_come_in_pieces_of_any_size(self, size: int) -> None:
        whole = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + chunk(b'{"text"') + chunk(b':""}') + b"0\r\n\r\n"
        async with serving(replying(*(whole[at : at + size] for at in range(0, len(whole), size)))) as (_, pool, _):
            assert await ask(pool) == (200, b'{"text":""}')
            assert await ask(pool) == (200, b'{"text":""}')

    async def test_nobody_there_is_unreachable(self) -> None:
        with pytest.raises(EngineUnreachable):
            await ask(EnginePool(f"http://127.0.0.1:{free_port()}"))

    @pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 O", WHOLE[:-1]])
    async def test_a_whole_answer_that_is_cut_short_is_as_good_as_none(self, sent: bytes) -> None:
        async def cut(peer: Peer, _: bytes) -> None:
            await peer.write(sent)
            peer.close()

        async with serving(cut) as (_, pool, _):
            with pytest.raises(EngineUnreachable):
                await ask(pool)

    async def test_what_is_not_http_is_no_answer(self) -> None:
        async with serving(replying(b"SSH-2.0-OpenSSH\r\n")) as (_, _, client):
            with pytest.raises(EngineBroke, match="not HTTP"):
                await client.open_stream("/x", b"{}")

    async def test_an_answer_has_a_largest_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "_ANSWER_BYTES_MAX", 10)
        async with serving(replying(WHOLE)) as (_, pool, _):
            with pytest.raises(EngineUnreachable, match="more than 10 bytes"):
                await ask(pool)

    async def test_an_engine_that_stands_still_ends_whole_answers_that_have_waited_as_long_and_no_others(self) -> None:
        async with serving(silent) as (_, _, client):
            old = await client.ask("/x", b"{}")
            old._connection._heard_at -= PATIENT.silence_s_max
            young = await client.ask("/x", b"{}")
            client.still_for(PATIENT.silence_s_max / 2)
            await is_waited_for(old)
            client.still_for(PATIENT.silence_s_max)
            with pytest.raises(EngineTimeout, match="has done nothing"):
                await old.fields()
            await is_waited_for(young)

    async def test_nothing_is_waited_for_any_more_at_an_engine_that_was_lost_but_for_streams_that_have_begun(
        self,
    ) -> None:
        async def begin(peer: Peer, request: bytes) -> None:
            if b"stream" in request:
                await peer.write(CHUNKED)

        async with serving(begin) as (_, _, client):
            stream = await client.open_stream("/stream", b"{}")
            whole = await client.ask("/x", b"{}")
            await is_waited_for(whole)
            client.abandon_unanswered()
            with pytest.raises(EngineUnreachable, match="any more"):
                await whole.fields()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(stream)
            stream.close()

    async def test_what_is_brief_has_the_time_of_silence(self) -> None:
        async with serving(silent, BackendSettings(silence_s_max=0.3, answer_s_max=60)) as (_, _, client):
            answer = await client.ask("/v1/embeddings", b"{}", brief=True)
            with pytest.raises(EngineTimeout):
                await answer.fields()

    async def test_a_whole_answer_has_its_time_however_it_trickles(self) -> None:
        async def trickle(peer: Peer, _: bytes) -> None:
            await peer.write(CHUNKED)
            while not peer.writer.is_closing():
                await peer.write(chunk(b" "))
                await asyncio.sleep(0.02)

        async with serving(trickle, BRIEF) as (_, _, client):
            answer = await client.ask("/x", b"{}")
            with pytest.raises(EngineTimeout):
                await answer.fields()
            answer.close()

    async def test_an_answer_that_was_given_up_can_be_asked_for_again(self) -> None:
        may_answer = asyncio.Event()

        async def later(peer: Peer, _: bytes) -> None:
            await may_answer.wait()
            await peer.write(WHOLE)

        async with serving(later) as (_, _, client):
            answer = await client.ask("/x", b"{}")
            waiting = asyncio.create_task(answer.fields())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            may_answer.set()
            assert await answer.fields() == {"text": ""}
            answer.close()


class TestStreams:
    async def test_a_stream_that_ended_leaves_its_connection_to_the_next_though_its_tail_is_late(self) -> None:
        may_end = asyncio.Event()

        async def tail_late(peer: Peer, _: bytes) -> None:
            await peer.write(CHUNKED + chunk(EVENT + b"data: [DONE]\n\n"))
            await may_end.wait()
            await peer.write(b"0\r\n\r\n")

        async with serving(tail_late) as (server, pool, client):
            stream = await client.open_stream("/x", b"{}")
            assert len([chunk async for chunk in stream]) == 1
            stream.close()
            stream.close()
            may_end.set()
            await eventually(lambda: len(client._pool._idle) == 1)
            (await client.open_stream("/x", b"{}")).close()
            assert len(server.peers) == 1
            assert not pool._open

    async def test_a_tail_that_never_comes_costs_the_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "_TAIL_S_MAX", 0.05)
        async with serving(replying(CHUNKED + chunk(b"data: [DONE]\n\n"))) as (_, _, client):
            stream = await client.open_stream("/x", b"{}")
            assert [chunk async for chunk in stream] == []
            stream.close()
            await eventually(lambda: not client._pool._open)

    async def test_a_stream_that_is_closed_in_the_middle_is_dropped(self) -> None:
        async with serving(replying(CHUNKED + chunk(EVENT))) as (_, _, client):
            stream = await client.open_stream("/x", b"{}")
            await anext(stream)
            stream.close()
            await eventually(lambda: not client._pool._open)

    async def test_what_came_before_a_break_is_handed_out_first(self) -> None:
        async def cut(peer: Peer, _: bytes) -> None:
            await peer.write(CHUNKED + chunk(EVENT))
            peer.close()

        async with serving(cut) as (_, _, client):
            stream = await client.open_stream("/x", b"{}")
            assert (await anext(stream)).body is not None
            with pytest.raises(EngineBroke):
                await anext(stream)
            stream.close()

    @pytest.mark.load
    async def test_silence_ends_a_stream_and_a_steady_one_goes_on(self) -> None:
        async def steady_then_silent(peer: Peer, _: bytes) -> None:
            await peer.write(CHUNKED)
            for _step in range(25):
                await peer.write(chunk(EVENT))
                await asyncio.sleep(0.05)

        async with serving(steady_then_silent, BRIEF) as (_, _, client):
            stream = await client.open_stream("/x", b"{}")
            for _ in range(25):  # longer in all than the silence that is allowed
                await anext(stream)
            with pytest.raises(EngineTimeout):
                await anext(stream)
            stream.close()

    @pytest.mark.load
    async def test_a_reader_that_waits_makes_the_engine_wait_and_is_not_taken_for_silence(self) -> None:
        sent = 0

        async def flood(peer: Peer, _: bytes) -> None:
            nonlocal sent
            await peer.write(CHUNKED)
            for _step in range(400):
                await peer.write(chunk(EVENT * 400))
                sent += 1
            await peer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

        async with serving(flood, BRIEF) as (_, _, client):
            stream = await client.open_stream("/x", b"{}")
            await asyncio.sleep(1.5)  # longer than the silence that is allowed
            assert sent < 400
            assert client._pool._open
            assert len([chunk async for chunk in stream]) == 400 * 400
            stream.close()
            assert len(client._pool._idle) == 1

    async def test_a_refusal_is_told_though_its_body_does_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("backends.client._REFUSAL_BODY_S", 0.05)
        refused = CHUNKED.replace(b"200 OK", b"503 Busy") + chunk(b"queue is full")
        async with serving(replying(refused)) as (_, _, client):
            with pytest.raises(EngineRefused, match="queue is full") as caught:
                await client.open_stream("/x", b"{}")
            assert caught.value.status == 503
            await eventually(lambda: not client._pool._open)
