"""Before the database has answered: refusals in each dialect's words, and health that tells a start from a fault."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sse_starlette.sse import AppStatus

from api.awaiting import answer_until, awaiting_app
from api.settings import Settings
from tests.api.exchange import get, post
from tests.fakes import ACCOUNT


def settings(home: Path, **more: Any) -> Settings:
    return Settings(home=home, cache_dir=home, **more)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "application/json"),
        (f"/client/v4/accounts/{ACCOUNT}/ai/run/m", "application/json"),
        (f"/console/v1/accounts/{ACCOUNT}/keys", "application/problem+json"),
        ("/nowhere", "application/problem+json"),
    ],
)
async def test_whatever_is_asked_is_to_be_asked_again_soon(tmp_path: Path, path: str, kind: str) -> None:
    answer = await post(awaiting_app(settings(tmp_path)), path, {"model": "m"})
    assert (answer.status, answer.headers["content-type"]) == (503, kind)
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-request-id"] in answer.body.decode()


async def test_a_body_that_is_too_large_is_refused_as_ever(tmp_path: Path) -> None:
    answer = await post(awaiting_app(settings(tmp_path, body_bytes_max=1_024)), "/v1/chat/completions", b"x" * 2_000)
    assert answer.status == 413


async def test_the_process_lives_is_not_ready_and_counts(tmp_path: Path) -> None:
    app = awaiting_app(settings(tmp_path))
    assert (await get(app, "/health/live")).status == 200
    ready = await get(app, "/health/ready")
    assert (ready.status, ready.json["reason"]) == (503, "the database does not answer")
    metrics = (await get(app, "/metrics")).body.decode()
    assert "pagegate_database_away 1.0" in metrics
    assert "pagegate_http_requests_total" in metrics


async def _answered(listener: socket.socket) -> int:
    host, port = listener.getsockname()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{host}:{port}/v1/chat/completions", json={}) as answer,
    ):
        return answer.status


async def test_the_port_stays_open_for_the_service_that_follows(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = asyncio.Event()
        waiting = asyncio.create_task(answer_until(listener, settings(tmp_path), asked.wait()))
        assert await _answered(listener) == 503
        asked.set()
        assert await waiting is True
        with socket.create_connection(listener.getsockname(), timeout=5):
            listener.accept()[0].close()


async def test_a_signal_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A signal ends server-sent events of its whole process, and for good: other tests have theirs in this one.
    monkeypatch.setattr(AppStatus, "should_exit", False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        waiting = asyncio.create_task(answer_until(listener, settings(tmp_path), asyncio.Event().wait()))
        assert await _answered(listener) == 503
        os.kill(os.getpid(), signal.SIGHUP)
        assert await _answered(listener) == 503, "there is no deployment file to read again, and no harm"
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await waiting is None


async def test_what_else_is_in_the_way_ends_it_too(tmp_path: Path) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.05)
        raise OSError("the disk is full")

    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError, match="disk"):
        await answer_until(listener, settings(tmp_path), fail())
