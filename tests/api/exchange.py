"""Drives an ASGI application message by message: what was sent, when, and a client that can leave or stop reading.

Behaves as uvicorn does where routes can tell: paths arrive decoded; after the answer, `receive` says disconnect.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson
from starlette.types import ASGIApp, Message

from tests.fakes import KEY, until


@dataclass
class Exchange:
    """One request under way. `chunks`: the body parts sent so far."""

    app: ASGIApp
    scope: dict[str, Any]
    parts: list[bytes]
    never_ends: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self._left = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._pending = list(self.parts)
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> "Exchange":
        async with asyncio.timeout(20):
            await self.app(self.scope, self._receive, self._send)
        return self

    def start(self) -> "Exchange":
        self.task = asyncio.create_task(self.run_quietly(), name="exchange")
        return self

    async def run_quietly(self) -> None:
        await self.run()

    async def ended(self) -> None:
        assert self.task is not None, "start it first"
        await self.task

    async def until_sent(self, count: int) -> None:
        await until(lambda: len(self.chunks) >= count)

    def leave(self) -> None:
        self._left.set()
        self._reading.set()

    def stop_reading(self) -> None:
        self._reading.clear()

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    async def _receive(self) -> Message:
        if self._pending:
            part = self._pending.pop(0)
            return {
                "type": "http.request",
                "body": part,
                "more_body": bool(self._pending) or self.never_ends,
            }
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self._reading.wait()
        if self._left.is_set():
            return
        if message["type"] == "http.response.start":
            assert not self.status, "an answer starts once"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert not self.complete, "nothing is sent after the end"
        if message.get("body"):
            self.chunks.append(message["body"])
        if not message.get("more_body", False):
            self.complete = True
            self._left.set()


def exchange(
    app: ASGIApp,
    method: str,
    path: str,
    *,
    body: object = b"",
    key: str | None = KEY,
    headers: dict[str, str] | None = None,
    never_ends: bool = False,
) -> Exchange:
    """body: bytes as they are, a list of bytes as parts, anything else as JSON. never_ends: the client trickles on."""
    parts = body if isinstance(body, list) else [body if isinstance(body, bytes) else orjson.dumps(body)]
    path, _, query = path.partition("?")
    sent = {"content-type": "application/json", **(headers or {})}
    if key is not None:
        sent["authorization"] = f"Bearer {key}"
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8787),
    }
    return Exchange(app, scope, parts, never_ends=never_ends)


async def call(app: ASGIApp, method: str, path: str, **options: Any) -> Exchange:
    return await exchange(app, method, path, **options).run()


async def post(app: ASGIApp, path: str, body: object, **options: Any) -> Exchange:
    return await call(app, "POST", path, body=body, **options)


async def get(app: ASGIApp, path: str, **options: Any) -> Exchange:
    return await call(app, "GET", path, **options)
