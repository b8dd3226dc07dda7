"""A relay before an engine that can freeze the engine's load reports: it gives the last one again and again.

All else passes as it comes. It runs in a thread with a loop of its own, so that the tests' loop may be busy.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

_START_S_MAX = 60.0
_OF_ONE_HOP = frozenset({"transfer-encoding", "content-length", "connection", "content-encoding", "date", "server"})


class Relay:
    """frozen: set by the test. repeated: how many reports were old ones."""

    def __init__(self, engine_url: str) -> None:
        self.url = ""
        self.frozen = False
        self.repeated = 0
        self._engine_url = engine_url
        self._report: bytes | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/loads":
            return await self._pass(request)
        if not self.frozen or self._report is None:
            async with request.app[_SESSION].get(self._engine_url + request.path_qs) as answer:
                report = await answer.read()
                if answer.status != 200:
                    return web.Response(status=answer.status, body=report)
                self._report = report
        else:
            self.repeated += 1
        return web.Response(body=self._report, content_type="application/json")

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        sent = {name: request.headers[name] for name in ("content-type",) if name in request.headers}
        asked = request.app[_SESSION].request(
            request.method, self._engine_url + request.path_qs, data=await request.read(), headers=sent
        )
        async with asked as answer:
            passed = web.StreamResponse(status=answer.status)
            passed.headers.extend({k: v for k, v in answer.headers.items() if k.lower() not in _OF_ONE_HOP})
            await passed.prepare(request)
            async for part in answer.content.iter_any():
                await passed.write(part)
            await passed.write_eof()
            return passed

    async def serve(self, serving: threading.Event, stop: asyncio.Event) -> None:
        """Whoever leaves a stream here has left it at the engine too."""
        bounds = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=bounds) as session:
            app = web.Application(client_max_size=16 << 20)
            app[_SESSION] = session
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            serving.set()
            await stop.wait()
            await runner.cleanup()


_SESSION: web.AppKey[aiohttp.ClientSession] = web.AppKey("session", aiohttp.ClientSession)


@contextmanager
def relaying(engine_url: str) -> Iterator[Relay]:
    """A relay that serves."""
    relay, serving, stop = Relay(engine_url), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(relay.serve(serving, stop),), name="relay")
    thread.start()
    try:
        assert serving.wait(_START_S_MAX), "the relay does not serve"
        yield relay
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_START_S_MAX)
        loop.close()
