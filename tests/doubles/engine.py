"""A scripted engine that speaks SGLang's HTTP surface on a free port and records what it was asked.

In a test: `async with ScriptedEngine() as engine: engine.url`. As a process of its own: `python -m tests.doubles.engine
--port P`, steered by `POST /_script` and read by `GET /_state`. A client that leaves and an abort stop a generation at
once. It knows no tokenizer: prompt tokens are the ids it is sent, or the words of a text.
"""

import argparse
import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self

import orjson
from aiohttp import web

from tests.doubles import reports, wire
from tests.doubles.generation import ConnectionDropped, FailedInside, Generation
from tests.doubles.rooms import PrefillLost, Rooms
from tests.doubles.script import Script, parse_script
from tests.doubles.wire import Call

BODY_BYTES_MAX = 64 * 2**20
DEFAULT_MAX_TOKENS = 128  # SGLang's own default where a request names none
CUT_PAUSE_S = 0.001  # long enough for the reader to wake up between two writes


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it came in."""

    path: str
    body: dict[str, Any]
    headers: Mapping[str, str]


class ScriptedEngine:
    """The double. Attributes are for the test to read; `steer` and `script` say what comes next.

    requests: every generation request. live: running generations by rid. produced: tokens by rid, also of ended ones.
    aborts: rids asked to be aborted. sent: the body of each streamed answer by rid. peak_used_tokens: the most tokens
    that were in use at once.

    role, rooms: of a half of a prefill/decode pair; both halves share their rooms. ranks: of data parallelism, each
    with a pool of pool_tokens.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        pool_tokens: int = 65_536,
        context_tokens: int = 8_192,
        page_tokens: int = 16,
        running_max: int = 1_024,
        kv_cache_dtype: str = "bfloat16",
        role: Literal["unified", "prefill", "decode"] = "unified",
        rooms: Rooms | None = None,
        ranks: int = 1,
        port: int = 0,
    ) -> None:
        assert (role == "unified") == (rooms is None), "the halves of a pair meet in rooms"
        self.script = script or Script()
        self.requests: list[Received] = []
        self.live: dict[str, Generation] = {}
        self.produced: dict[str, int] = {}
        self.aborts: list[str] = []
        self.sent: dict[str, bytearray] = {}
        self.peak_used_tokens = 0
        self.polls = 0
        self.pool_tokens = pool_tokens
        self.context_tokens = context_tokens
        self.page_tokens = page_tokens
        self.running_max = running_max
        self.kv_cache_dtype = kv_cache_dtype
        self._role = role
        self._rooms = rooms
        self._ranks = ranks
        self._port = port
        self._runner: web.AppRunner | None = None
        self._epoch = secrets.token_hex(8)
        self.released = False  # has it given up its memory?
        self.memory = "still"  # or leaving, or returning
        self._last_figures = self._figures_by_rank()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def steer(self, **changes: Any) -> None:
        """Replaces the script by the default one with these changes."""
        self.script = replace(Script(), **changes)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/_script", self._take_script),
                web.get("/_state", self._state),
                web.post("/abort_request", self._abort),
                web.post("/release_memory_occupation", self._release),
                web.post("/resume_memory_occupation", self._resume),
                web.get("/v1/loads", self._loads),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.get("/metrics", self._metrics),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
            ],
        )
        # A departed client cancels its handler, which ends its generation.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None, "entered before left"
        for generation in list(self.live.values()):
            generation.stop()
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        script = self.script
        body = orjson.loads(await request.read())
        self.requests.append(Received(request.path, body, dict(request.headers)))
        if self.released:
            return web.Response(status=503)
        if script.refuse is not None:
            refusal = script.refuse
            return web.Response(status=refusal.status, body=refusal.body, headers={**refusal.headers})
        call = self._read_call(body, chat=chat)
        if isinstance(call, str):
            return _error(call)
        async with self._running(Generation(call, script)) as generation:
            try:
                async with self._in_its_room(body, generation):
                    await generation.before_the_first()
                    if call.stream:
                        return await self._stream(request, generation)
                    return await self._answer(generation)
            except ConnectionDropped:
                return await _drop(request)
            except PrefillLost:
                return _error("Lost connection with prefill instance", status=500, kind="InternalServerError")
            except FailedInside:
                return _error("The scripted engine failed inside.", status=500, kind="InternalServerError")

    @asynccontextmanager
    async def _in_its_room(self, body: dict[str, Any], generation: Generation) -> AsyncIterator[None]:
        """A half of a pair waits for the other before its first token."""
        if self._rooms is None:
            yield
            return
        room = body["bootstrap_room"]
        if self._role == "decode":
            await self._rooms.decode_has_pages(room, generation)
            yield
            return
        try:
            await self._rooms.prefill_waits(room, generation)
            yield
            if generation.finish_reason != "abort":
                self._rooms.handed_over(room)
        finally:
            self._rooms.prefill_is_gone(room)

    def _read_call(self, body: dict[str, Any], *, chat: bool) -> Call | str:
        """What is asked for, or why it is refused."""
        prompt = body.get("input_ids") if chat else body.get("prompt")
        if chat and prompt is None:
            prompt = " ".join(str(message.get("content")) for message in body.get("messages") or [])
        if not prompt:
            return "The prompt is empty."
        prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        room = min(self.context_tokens, self.pool_tokens) - prompt_tokens
        if room < 1:
            return f"The input ({prompt_tokens} tokens) is longer than the model's context length or the KV cache."
        if body.get("n", 1) != 1:
            return "n must be 1."
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
        if not isinstance(asked, int) or asked < 1:
            return "max_tokens must be a positive integer."
        rank = body.get("routed_dp_rank") or 0
        if rank not in range(self._ranks):
            return f"routed_dp_rank={rank} out of range [0, {self._ranks})"
        rid = str(body.get("rid") or f"double-{len(self.requests)}")
        if rid in self.live:
            return f"The request id {rid} is live already."
        stop = body.get("stop") or ()
        options = body.get("stream_options") or {}
        return Call(
            rid=rid,
            chat=chat,
            model=str(body.get("model")),
            created=int(time.time()),
            prompt_tokens=prompt_tokens,
            max_tokens=1 if self._role == "prefill" else min(asked, room),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stream=bool(body.get("stream")),
            include_usage=bool(options.get("include_usage")),
            running_usage=bool(options.get("continuous_usage_stats")),
            rank=rank,
        )

    @asynccontextmanager
    async def _running(self, generation: Generation) -> AsyncIterator[Generation]:
        rid = generation.call.rid
        self.live[rid] = generation
        self.produced[rid] = 0
        try:
            yield generation
        finally:
            self._note(generation)
            del self.live[rid]

    def _note(self, generation: Generation) -> None:
        self.produced[generation.call.rid] = generation.produced
        self.peak_used_tokens = max(self.peak_used_tokens, self.used_tokens())

    def used_tokens(self, rank: int | None = None) -> int:
        """Tokens of running requests, each rounded up to whole pages. rank: there alone; None: everywhere."""
        pages = sum(-(-generation.used_tokens // self.page_tokens) for generation in self._at(rank))
        return pages * self.page_tokens

    def _at(self, rank: int | None) -> list[Generation]:
        return [generation for generation in self.live.values() if rank is None or generation.call.rank == rank]

    async def _answer(self, generation: Generation) -> web.Response:
        call, script = generation.call, generation.script
        while await generation.next_token() is not None:
            self._note(generation)
        final = None if script.no_usage else wire.usage(call, generation.produced, script.usage, final=True)
        assert generation.finish_reason is not None, "ended"
        body = wire.completion(call, generation.text, generation.finish_reason, final)
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        sent = self.sent[generation.call.rid] = bytearray()
        events = _raw(generation.script.raw) if generation.script.raw is not None else self._events(generation)
        async for event in events:
            await _write_in_pieces(response, event, len(sent), generation.script.cut)
            sent += event
        await response.write_eof()
        return response

    async def _events(self, generation: Generation) -> AsyncIterator[bytes]:
        call, script = generation.call, generation.script
        if call.chat:
            yield wire.role_chunk(call)
        try:
            while (text := await generation.next_token()) is not None:
                self._note(generation)
                running = None
                if call.running_usage and not script.no_usage:
                    running = wire.usage(call, generation.produced, script.usage, final=False)
                # A completions stream says how it ended on its last token's chunk, a chat stream on one of its own.
                ended = None if call.chat else generation.finish_reason
                yield wire.token_chunk(call, text, running, finish_reason=ended)
        except FailedInside:
            yield wire.in_band_error("The scripted engine failed inside.")
            yield wire.DONE
            return
        assert generation.finish_reason is not None, "ended"
        if call.chat or generation.finish_reason == "abort" or not generation.produced:
            yield wire.finish_chunk(call, generation.finish_reason)
        if call.include_usage and not script.no_usage:
            yield wire.usage_chunk(call, wire.usage(call, generation.produced, script.usage, final=True))
        if not script.no_done:
            yield wire.DONE

    def abort(self, prefix: str) -> None:
        """Stops every running generation whose rid begins so, as SGLang does."""
        self.aborts.append(prefix)
        for rid, generation in self.live.items():
            if rid.startswith(prefix):
                generation.stop()

    async def _abort(self, request: web.Request) -> web.Response:
        if self.script.abort_status != 200:
            return web.Response(status=self.script.abort_status)
        body = orjson.loads(await request.read())
        self.abort("" if body.get("abort_all") else str(body["rid"]))
        return web.Response(status=200)

    def _figures(self, rank: int | None = None) -> reports.Figures:
        return reports.Figures(
            at_s=time.time(),
            running=len(self._at(rank)),
            used_tokens=self.used_tokens(rank),
            pool_tokens=self.pool_tokens,
            context_tokens=self.context_tokens,
            page_tokens=self.page_tokens,
            running_max=self.running_max,
        )

    def _figures_by_rank(self) -> dict[int, reports.Figures]:
        return {rank: self._figures(rank) for rank in range(self._ranks)}

    async def _loads(self, request: web.Request) -> web.Response:
        self.polls += 1
        if self.script.loads == "error":
            return web.Response(status=503)
        if self.script.loads != "stale":
            self._last_figures = self._figures_by_rank()
        asked = request.query.get("dp_rank")
        told = {rank: figures for rank, figures in self._last_figures.items() if asked in (None, str(rank))}
        return _json(reports.loads(told, self.script.loads_numbers))

    async def _server_info(self, request: web.Request) -> web.Response:
        del request
        info = reports.server_info(self._figures(), self._epoch, self.kv_cache_dtype, self._role, self._ranks)
        return _json(info)

    async def _model_info(self, request: web.Request) -> web.Response:
        del request
        return _json(reports.model_info())

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text=reports.metrics(self._figures()))

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=200)

    async def _ready(self, request: web.Request) -> web.Response:
        del request
        return web.Response(status=200 if self.script.ready and not self.released else 503)

    async def _release(self, request: web.Request) -> web.Response:
        del request
        if self.live:
            return web.Response(status=409)
        await self._change_memory("leaving")
        self.released = True
        return web.Response(status=200)

    async def _resume(self, request: web.Request) -> web.Response:
        del request
        if self.released:
            await self._change_memory("returning")
            self.released = False
            self._epoch = secrets.token_hex(8)
        return web.Response(status=200)

    async def _change_memory(self, moment: str) -> None:
        self.memory = moment
        await asyncio.sleep(self.script.memory_s)
        self.memory = "still"

    async def _take_script(self, request: web.Request) -> web.Response:
        self.script = parse_script(await request.read())
        return _json({"ok": True})

    async def _state(self, request: web.Request) -> web.Response:
        del request
        return _json(
            {
                "requests": [received.body for received in self.requests],
                "live": list(self.live),
                "memory": self.memory,
                "produced": self.produced,
                "aborts": self.aborts,
            },
        )


def _json(payload: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(payload), content_type="application/json")


def _error(message: str, *, status: int = 400, kind: str = "BadRequestError") -> web.Response:
    body = orjson.dumps(wire.error(message, kind, status))
    return web.Response(status=status, body=body, content_type="application/json")


async def _raw(events: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


async def _write_in_pieces(response: web.StreamResponse, event: bytes, offset: int, cut: tuple[int, ...]) -> None:
    """Writes an event that begins at offset of the body, split where the script says."""
    borders = sorted({at - offset for at in cut if offset < at < offset + len(event)})
    for start, end in pairwise((0, *borders, len(event))):
        await response.write(event[start:end])
        if borders:
            await asyncio.sleep(CUT_PAUSE_S)


async def _drop(request: web.Request) -> web.StreamResponse:
    """Closes the connection in mid-answer, as a dying process does; the handler then waits to be cancelled by it."""
    assert request.transport is not None, "still connected"
    request.transport.close()
    await asyncio.Event().wait()
    raise AssertionError


async def _serve(port: int) -> None:
    async with ScriptedEngine(port=port):
        await asyncio.Event().wait()  # until the process is ended


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(_serve(parser.parse_args().port))
