"""HTTP/1.1 to engines: kept-alive connections, one exchange at a time on each, parsed by httptools.

Used by client.py and sglang/probe.py. It is no general client: an engine's address is fixed, requests are whole, and an
answer says its length or comes in chunks. That costs a fifth of what a general one does (deploy/decisions/0040). All
trouble is raised as the BackendError family; nothing is tried twice.
"""

import asyncio
import time
from base64 import b64encode
from types import TracebackType
from typing import Self, cast
from urllib.parse import unquote, urlsplit

import httptools

from backends.errors import BackendError, EngineBroke, EngineTimeout, EngineUnreachable

# uvicorn, which serves SGLang, closes an idle connection after 5 s: ours are given up before.
_IDLE_S_MAX = 4.0
# What a stream's reader has not taken yet: above it the engine has to wait.
_UNREAD_BYTES_MAX = 256 << 10
# An answer that is read whole: 1,024 tokens with 20 alternatives each need some 4 MiB.
_ANSWER_BYTES_MAX = 64 << 20
# The last bytes of an exchange whose end is known already (a stream's closing chunk behind [DONE]).
_TAIL_S_MAX = 1.0


class Connection(asyncio.Protocol):
    """One connection to an engine. `send`, then `head` and `read` or `whole`, then `release`; and so again.

    A wait that is cancelled loses nothing: the next one goes on where it stopped, whoever asks.
    """

    def __init__(self, pool: "EnginePool", loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._unread = 0
        self._whole = False
        self._bound_s = self._heard_at = 0.0
        self._failure: BackendError | None = None
        self._paused = self._keeps_alive = self._tail = False
        self._status = 0
        self.complete = True
        self.idle_since = 0.0
        self.lost = loop.create_future()

    def send(self, request: bytes, *, whole: bool, within_s: float) -> None:
        """Begin an exchange. within_s: of silence for an answer that is read in pieces, in all for a whole one."""
        assert self.complete, "one exchange at a time"
        assert self._transport is not None, "connected"
        self.complete = self._tail = False
        self._status = self._unread = 0
        self._whole, self._bound_s, self._heard_at = whole, within_s, self._loop.time()
        self._timer = self._loop.call_later(within_s, self._overdue)
        self._transport.write(request)

    async def head(self) -> int:
        """The answer's status, once its head is there."""
        while not self._status:
            await self._more()
        return self._status

    async def read(self) -> bytes:
        """What came since the last call, waiting for it; empty at the end."""
        while not self._pieces and not self.complete:
            await self._more()
        pieces, self._pieces, self._unread = self._pieces, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def whole(self) -> tuple[int, bytes]:
        """Status and body of an answer that was asked for whole."""
        while not self.complete:
            await self._more()
        pieces = self._pieces
        return self._status, pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self, *, ended: bool = False) -> None:
        """The exchange is over for its owner. ended: all that matters has come, so the rest will, in a moment.

        The connection is kept if the answer is complete, and dropped if not.
        """
        self._pieces = []
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        if self.complete and self._keeps_alive and self._failure is None:
            self._pool.take_back(self)
        elif ended and not self.complete and self._failure is None:
            self._tail = True
            self._limit_to(_TAIL_S_MAX)
        else:
            self.drop()

    def give_up(self, *, older_s: float) -> None:
        """If a whole answer has been waited for so long, it is one that will not come."""
        if self._whole and not self.complete and self._loop.time() - self._heard_at >= older_s:
            self._fail(EngineTimeout(f"the engine has done nothing for {older_s:g} s"))

    def abandon_unanswered(self) -> None:
        """If an answer is waited for and nothing of it has come, nobody is there."""
        if not self.complete and not self._status:
            self._fail(EngineUnreachable("the engine can't be reached any more"))

    def drop(self) -> None:
        self._limit_to(None)
        if self._transport is not None:
            self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its base class

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self.drop()  # it speaks unasked
            return
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(EngineBroke(f"the engine's answer is not HTTP: {error!r:.200}"))
        if self.complete or not self._whole:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit_to(None)
        self._transport = None
        self._keeps_alive = False
        if not self.complete and self._failure is None:
            why = "" if exc is None else f": {type(exc).__name__}"
            self._failure = (
                EngineBroke(f"the engine's answer was cut short{why}")
                if self._status
                else EngineUnreachable(f"the engine dropped the connection{why}")
            )
        self._wake()
        self._pool.forget(self)
        if not self.lost.done():
            self.lost.set_result(None)

    # What the parser calls.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._tail:
            return
        self._pieces.append(body)
        self._unread += len(body)
        if self._whole:
            if self._unread > _ANSWER_BYTES_MAX:
                self._fail(EngineBroke(f"the engine's answer has more than {_ANSWER_BYTES_MAX} bytes"))
        elif self._unread > _UNREAD_BYTES_MAX and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._status < 200:
            self._status = 0  # 100 Continue and the like come before the answer
            return
        if self._failure is not None:
            return
        self.complete = True
        self._limit_to(None)
        if self._tail:
            self.release()

    def _more(self) -> "asyncio.Future[None]":
        """Done when more has come, or nothing more will. Raises what the exchange has failed with."""
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: BackendError) -> None:
        self._failure = error
        self.drop()
        self._wake()

    def _limit_to(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._bound_s, self._heard_at = seconds, self._loop.time()
            self._timer = self._loop.call_later(seconds, self._overdue)

    def _overdue(self) -> None:
        if not self._whole:
            if self._paused:
                self._heard_at = self._loop.time()  # it can't say anything while we don't listen
            due_in_s = self._heard_at + self._bound_s - self._loop.time()
            if due_in_s > 0:
                self._timer = self._loop.call_later(due_in_s, self._overdue)
                return
        self._fail(EngineTimeout(f"the engine did not answer within {self._bound_s:g} s"))


class EnginePool:
    """The connections to one engine. Concurrency is bounded by admission, not here."""

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urlsplit(url)
        assert parts.hostname is not None, "settings check the URL"
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._headers += f"Authorization: Basic {b64encode(secret.encode()).decode()}\r\n"
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a request; a body is JSON."""
        return b"%b\r\n" % self.head(method, path) if body is None else post(self.head(method, path), body)

    def head(self, method: str, path: str) -> bytes:
        """A request's first lines, for `post`: all that is the same in every call of a path."""
        return f"{method} {self._prefix}{path}{self._headers}".encode()

    async def connection(self, *, within_s: float) -> Connection:
        """An idle connection, else a new one; the caller releases it. Raises EngineUnreachable."""
        oldest = time.monotonic() - _IDLE_S_MAX
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest:
                return connection
            connection.drop()
        return await self._made(within_s=within_s)

    async def _spare(self, within_s: float) -> None:
        self.take_back(await self._made(within_s=within_s))

    async def _made(self, *, within_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, loop), self._host, self._port, ssl=self._tls or None
                )
        except TimeoutError:
            raise EngineUnreachable(f"no connection to {self._url} within {within_s:g} s") from None
        except OSError as error:
            raise EngineUnreachable(f"no connection to {self._url}: {type(error).__name__}") from error
        self._open.add(connection)
        return connection

    async def keep_spare(self, count: int, *, within_s: float) -> None:
        """So many idle connections that can be used for a while yet. Raises EngineUnreachable."""
        fresh_from = time.monotonic() - _IDLE_S_MAX / 2
        missing = count - sum(connection.idle_since > fresh_from for connection in self._idle)
        await asyncio.gather(*(self._spare(within_s) for _ in range(missing)))

    async def exchange(self, request: bytes, *, within_s: float, connect_s: float) -> tuple[int, bytes]:
        """Status and body of an answer that is read whole. An answer that is cut short counts as none."""
        connection = await self.connection(within_s=connect_s)
        try:
            connection.send(request, whole=True, within_s=within_s)
            return await connection.whole()
        except EngineBroke as error:
            raise EngineUnreachable(error.message) from error
        finally:
            connection.release()

    def give_up(self, *, older_s: float) -> None:
        """Whole answers that have been waited for so long."""
        for connection in list(self._open):
            connection.give_up(older_s=older_s)

    def abandon_unanswered(self) -> None:
        """Idle connections too: they lead nowhere."""
        for connection in list(self._open):
            connection.abandon_unanswered()
        for connection in list(self._idle):
            connection.drop()

    def take_back(self, connection: Connection) -> None:
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S_MAX, self._drop_idle)

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        """Drop every connection, whatever it is at."""
        if self._sweep is not None:
            self._sweep.cancel()
        left = list(self._open)
        for connection in left:
            connection.drop()
        if left:
            await asyncio.wait([connection.lost for connection in left], timeout=_TAIL_S_MAX)

    def _drop_idle(self) -> None:
        oldest = time.monotonic() - _IDLE_S_MAX
        kept = [connection for connection in self._idle if connection.idle_since > oldest]
        for connection in self._idle:
            if connection.idle_since <= oldest:
                connection.drop()
        self._idle = kept
        wait_s = kept[0].idle_since - oldest if kept else 0.0
        self._sweep = asyncio.get_running_loop().call_later(wait_s, self._drop_idle) if kept else None


def post(head: bytes, body: bytes) -> bytes:
    """A whole request from its first lines and its JSON body."""
    return b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


class EngineSession:
    """The pools of one process, closed together. `async with open_session() as session:`"""

    def __init__(self) -> None:
        self._pools: list[EnginePool] = []

    def pool(self, url: str) -> EnginePool:
        pool = EnginePool(url)
        self._pools.append(pool)
        return pool

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def open_session() -> EngineSession:
    """For all engines of one process; the caller closes it."""
    return EngineSession()
