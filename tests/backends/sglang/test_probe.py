"""What is read from a server, and what a bad answer is called."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from backends.errors import BackendError, EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable
from backends.sglang.probe import read_reports
from tests.doubles.engine import ScriptedEngine
from tests.engines import free_port


@asynccontextmanager
async def server(info: web.Response | None) -> AsyncIterator[str]:
    """Answers /server_info as told, or never; everything else is missing."""

    async def answer(_: web.Request) -> web.Response:
        if info is not None:
            return info
        raise web.HTTPInternalServerError

    app = web.Application()
    app.router.add_get("/server_info", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_all_three_reports_are_read() -> None:
    async with ScriptedEngine() as engine:
        reports = await read_reports(engine.url, within_s=5)
    assert reports.server_info["page_size"] > 0
    assert len(reports.loads["loads"]) == 1
    assert reports.metrics


@pytest.mark.parametrize(
    ("info", "error"),
    [
        (web.Response(text="[]"), EngineBroke),
        (web.Response(text="{"), EngineBroke),
        (web.Response(text="{}"), EngineRefused),  # /v1/loads is missing
        (None, EngineRefused),
    ],
)
async def test_a_bad_answer_is_a_typed_error(info: web.Response | None, error: type[BackendError]) -> None:
    async with server(info) as url:
        with pytest.raises(error):
            await read_reports(url, within_s=5)


async def test_nobody_there_is_unreachable() -> None:
    with pytest.raises(EngineUnreachable):
        await read_reports(f"http://127.0.0.1:{free_port()}", within_s=5)


async def test_silence_has_a_bound() -> None:
    taken, left = asyncio.Event(), asyncio.Event()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.set()
        await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(keep_silent, "127.0.0.1", port := free_port()):
        with pytest.raises(EngineTimeout):
            await read_reports(f"http://127.0.0.1:{port}", within_s=0.2)
        await taken.wait()
        await left.wait()
