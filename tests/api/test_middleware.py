"""What every request gets, whatever becomes of it: an id, a bounded body, one log line, one count."""

from typing import Any
from uuid import UUID

import orjson
import pytest
import structlog
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from api.app import create_app
from api.middleware import BodyBounds, RequestCounts, RequestRim
from tests.api.exchange import call, exchange, get, post
from tests.fakes import ACCOUNT, KEY, MODEL, Fakes, FakeStream

CHAT = "/v1/chat/completions"
RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


class TestRequestId:
    @pytest.mark.parametrize("path", [CHAT, RUN, "/health/live", "/nothing", "/client/v4/nothing"])
    async def test_is_on_every_answer(self, app: ASGIApp, path: str) -> None:
        answer = await post(app, path, BODY)
        assert UUID(answer.headers["x-request-id"]).version == 7
        assert answer.headers["cf-ai-req-id"] == answer.headers["x-request-id"]

    async def test_is_ours_and_not_the_clients(self, app: ASGIApp, fakes: Fakes) -> None:
        answer = await post(app, CHAT, {**BODY, "rid": "mine"}, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] != "mine"
        assert fakes.pipeline.requests[0].id == answer.headers["x-request-id"] == answer.json["id"]

    async def test_is_on_streams(self, app: ASGIApp, fakes: Fakes) -> None:
        answer = await post(app, CHAT, {**BODY, "stream": True})
        assert answer.headers["x-request-id"] == fakes.pipeline.requests[0].id


def small(fakes: Fakes, **changes: Any) -> ASGIApp:
    fakes.settings = fakes.settings.model_copy(update=changes)
    return create_app(fakes.services)


class TestBodyLimit:
    @pytest.mark.parametrize(("path", "code"), [(CHAT, "request_too_large"), (RUN, 3006)])
    async def test_holds_to_the_byte(self, fakes: Fakes, path: str, code: object) -> None:
        body = orjson.dumps({**BODY, "padding": "x" * 2_000})
        assert (await post(small(fakes, body_bytes_max=len(body)), path, body)).status == 200
        for parts in ([body], [body[:100], body[100:]]):
            answer = await post(small(fakes, body_bytes_max=len(body) - 1), path, parts)
            assert answer.status == 413
            assert code in {answer.json["errors"][0]["code"], (answer.json.get("error") or {}).get("code")}
        assert len(fakes.pipeline.requests) == 1

    @pytest.mark.parametrize("path", [RUN, f"/client/v4/accounts/{ACCOUNT}/ai/run/x/v1/files"])
    async def test_of_files_is_for_files_alone(self, fakes: Fakes, path: str) -> None:
        app = small(fakes, body_bytes_max=1_000)
        assert (await post(app, path, b"x" * 1_001)).status == 413
        assert (await post(app, "/v1/files", b"x" * 1_001)).status == 400
        assert (await post(app, f"/client/v4/accounts/{ACCOUNT}/ai/v1/files", b"x" * 1_001)).status == 400

    async def test_is_told_from_the_announced_length_before_anything_is_read(self, fakes: Fakes) -> None:
        app = small(fakes, body_bytes_max=1_000)
        for length in ("1001", "9" * 30):
            waiting = exchange(app, "POST", CHAT, body=[b"x"], headers={"content-length": length}, never_ends=True)
            assert (await waiting.run()).status == 413
            assert waiting._pending == [b"x"], "nothing was read"

    async def test_a_body_that_trickles_is_refused_at_its_deadline(self, fakes: Fakes) -> None:
        answer = await post(small(fakes, body_seconds_max=0.05), CHAT, [b"{", b'"a"'], never_ends=True)
        assert answer.status == 408
        assert answer.json["errors"][0]["code"] == 3007
        assert answer.headers["connection"] == "close"

    async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(self, fakes: Fakes) -> None:
        sending = exchange(create_app(fakes.services), "POST", CHAT, body=[b"{"], never_ends=True).start()
        sending.leave()
        await sending.ended()
        assert fakes.pipeline.requests == []


class TestContentEncoding:
    @pytest.mark.parametrize(("path", "number"), [(CHAT, 3003), (RUN, 3003)])
    @pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "identity, gzip"])
    async def test_a_compressed_body_is_refused_and_the_answer_says_what_to_do(
        self, app: ASGIApp, fakes: Fakes, path: str, number: int, coding: str
    ) -> None:
        answer = await post(app, path, b"\x1f\x8b", headers={"content-encoding": coding})
        assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
        assert answer.json["errors"][0]["code"] == number
        assert "without Content-Encoding" in answer.json["errors"][0]["message"]
        assert fakes.pipeline.requests == []

    async def test_a_body_that_says_it_is_as_it_is_passes(self, app: ASGIApp) -> None:
        assert (await post(app, CHAT, BODY, headers={"content-encoding": "identity"})).status == 200


class TestAccessLog:
    async def test_is_one_line_without_body_query_or_key(self, app: ASGIApp, fakes: Fakes) -> None:
        with structlog.testing.capture_logs() as logs:
            answer = await post(app, CHAT + "?token=secret", BODY)
        (line,) = logs
        assert line.pop("ms") >= 0
        assert line == {
            "event": "request",
            "log_level": "info",
            "method": "POST",
            "route": CHAT,
            "status": 200,
            "request_id": answer.headers["x-request-id"],
        }

    async def test_names_the_route_and_not_the_path(self, app: ASGIApp) -> None:
        with structlog.testing.capture_logs() as logs:
            await post(app, RUN, {"prompt": "private"})
            await get(app, "/some/private/path")
        assert [line["route"] for line in logs] == [
            "/client/v4/accounts/{account_id}/ai/run/{model:path}",
            "unmatched",
        ]
        assert "private" not in str(logs)
        assert KEY not in str(logs)

    async def test_a_departed_client_is_499(self, app: ASGIApp, fakes: Fakes) -> None:
        fakes.pipeline.completes = None
        with structlog.testing.capture_logs() as logs:
            waiting = exchange(app, "POST", CHAT, body=BODY).start()
            waiting.leave()
            await waiting.ended()
        assert [line["status"] for line in logs if line["event"] == "request"] == [499]


class TestUnforeseenErrors:
    @pytest.mark.parametrize(("path", "code"), [(CHAT, 3043), (RUN, 3043), ("/health/ready", None)])
    async def test_are_a_500_in_the_dialect_and_a_traceback_in_the_log(
        self, fakes: Fakes, path: str, code: int | None
    ) -> None:
        fakes.pipeline.completes = KeyError("private detail")
        fakes.is_ready = None  # type: ignore[assignment]  # unpacking it fails, as a bug would
        method = "GET" if code is None else "POST"
        with structlog.testing.capture_logs() as logs:
            answer = await call(create_app(fakes.services), method, path, body=BODY)
        assert answer.status == 500
        assert b"private detail" not in answer.body
        assert answer.headers["x-request-id"] in answer.body.decode()
        assert any(line.get("exc_info") for line in logs)
        if code is not None:
            assert answer.json["errors"][0]["code"] == code

    async def test_in_the_middle_of_a_stream_break_the_connection(self, app: ASGIApp, fakes: Fakes) -> None:
        stream = FakeStream(b"1", error=KeyError("bug"))
        fakes.pipeline.streams = stream
        running = exchange(app, "POST", CHAT, body={**BODY, "stream": True})
        with pytest.raises(KeyError):
            await running.run()
        assert not running.complete
        assert stream.closed == 1


class TestCounts:
    async def test_are_by_method_route_and_status(self) -> None:
        registry = CollectorRegistry()

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            response: Response = PlainTextResponse("x", status_code=int(Request(scope).url.path[1:]))
            await response(scope, receive, send)

        rim = RequestRim(inner, body=BodyBounds(10, 1), upload=BodyBounds(20, 1), counts=RequestCounts(registry))
        for method, path in (("GET", "/200"), ("GET", "/200"), ("MADE-UP", "/404")):
            await call(rim, method, path)

        def count(method: str, status: str) -> float | None:
            labels = {"method": method, "route": "unmatched", "status": status}
            return registry.get_sample_value("pagegate_http_requests_total", labels)

        assert count("GET", "200") == 2
        assert count("other", "404") == 1
        assert registry.get_sample_value("pagegate_http_request_seconds_count", {"route": "unmatched"}) == 3

    async def test_other_protocols_pass_through(self) -> None:
        seen = []

        async def inner(scope: Any, _receive: Any, _send: Any) -> None:
            seen.append(scope["type"])

        rim = RequestRim(
            inner, body=BodyBounds(10, 1), upload=BodyBounds(20, 1), counts=RequestCounts(CollectorRegistry())
        )
        await rim({"type": "lifespan"}, None, None)  # type: ignore[arg-type]  # nothing is received or sent
        assert seen == ["lifespan"]
