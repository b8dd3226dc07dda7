"""The cheapest engine there can be: prepared bytes over a raw protocol, so that only the gateways' cost is measured.

Started by gateway_cost.py as a process of its own. Answers what a gateway asks of SGLang: chat, not streamed or
streamed (as many chunks as `max_tokens`, one every --interval-ms), loads, server info, abort, health. Of a body it
reads only `stream`, `max_tokens`, `rid` and whether running usage is wanted.
"""

import argparse
import asyncio
import re
from functools import cache
from typing import cast

import httptools
import uvloop

MODEL = b"@cf/huggingfacetb/smollm2-135m-instruct"
PROMPT_TOKENS = 50
ANSWER_TOKENS = 16
ANSWER_TEXT = b"The capital of France is Paris, which lies on the Seine and has been its capital for long."
PIECE = b" Paris"
POOL_TOKENS = 1 << 22  # admission is not the bottleneck here

_RID = re.compile(rb'"rid":"([^"]+)"')
_MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
_NO_RID = b"0" * 36
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def usage(completion: int, details: bytes) -> bytes:
    return (
        b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":%b,"reasoning_tokens":0}'
        % (PROMPT_TOKENS, PROMPT_TOKENS + completion, completion, details)
    )


def answer(rid: bytes) -> bytes:
    return (
        b'{"id":"%b","object":"chat.completion","created":1790000000,"model":"%b","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"%b","reasoning_content":null,"tool_calls":null},"logprobs":null,'
        b'"finish_reason":"stop","matched_stop":null}],"usage":%b,"metadata":{"weight_version":"default"}}'
    ) % (rid, MODEL, ANSWER_TEXT, usage(ANSWER_TOKENS, b'{"cached_tokens":0}'))


@cache
def stream_templates(tokens: int, *, running: bool) -> tuple[list[bytes], bytes]:
    """The chunked frames of a stream with a placeholder for the id: the tokens' ones, and all that follows them."""
    head = b'data: {"id":"%b","object":"chat.completion.chunk","created":1790000000,"model":"%b","choices":[' % (
        _NO_RID,
        MODEL,
    )
    rest = b',"logprobs":null,"finish_reason":%b,"matched_stop":null}]'
    first = head + b'{"index":0,"delta":{"role":"assistant","content":""}' + rest % b"null" + b"}\n\n"
    frames = []
    for count in range(1, tokens + 1):
        tail = b',"usage":' + usage(count, b"null") if running else b""
        frames.append(
            head + b'{"index":0,"delta":{"content":"%b"}' % PIECE + rest % b"null" + tail + b"}\n\n",
        )
    frames[0] = first + frames[0]
    last = head + b'{"index":0,"delta":{}' + rest % b'"length"' + b"}\n\n"
    if running:
        last += head + b'],"usage":' + usage(tokens, b'{"cached_tokens":0}') + b"}\n\n"
    last += b"data: [DONE]\n\n"
    return [chunked(frame) for frame in frames], chunked(last) + b"0\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def respond(body: bytes, *, content_type: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (content_type, len(body), body)


LOADS = respond(
    b'{"timestamp":"2026-01-01T00:00:00+00:00","version":"0","loads":[{"timestamp":1790000000.0,"dp_rank":0,'
    b'"num_running_reqs":0,"num_waiting_reqs":0,"num_used_tokens":0,"max_total_num_tokens":%d,'
    b'"max_running_requests":100000,"token_usage":0.0}]}' % POOL_TOKENS,
)
SERVER_INFO = respond(
    b'{"page_size":16,"max_total_num_tokens":%d,"context_length":8192,"kv_cache_dtype":"bfloat16","version":"0",'
    b'"epoch":"bench"}' % POOL_TOKENS,
)
OK = respond(b"{}")


class Connection(asyncio.Protocol):
    """One connection, kept alive; one request at a time."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self._pending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its base class

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._pending is not None:
            self._pending.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._path.startswith(b"/v1/chat/completions"):
            self._generate()
        elif self._path.startswith(b"/v1/loads"):
            self._write(LOADS)
        else:
            self._write(SERVER_INFO if self._path.startswith(b"/server_info") else OK)

    def _generate(self) -> None:
        found = _RID.search(self._body)
        rid = found.group(1) if found else _NO_RID
        if b'"stream":true' not in self._body and b'"stream": true' not in self._body:
            self._write(respond(answer(rid)))
            return
        wanted = _MAX_TOKENS.search(self._body)
        tokens = int(wanted.group(1)) if wanted else ANSWER_TOKENS
        frames, last = stream_templates(tokens, running=b"continuous_usage_stats" in self._body)
        self._write(_STREAM_HEAD)
        self._step([frame.replace(_NO_RID, rid) for frame in frames], last.replace(_NO_RID, rid), 0)

    def _step(self, frames: list[bytes], last: bytes, at: int) -> None:
        if at < len(frames):
            self._write(frames[at])
            loop = asyncio.get_running_loop()
            self._pending = loop.call_later(self._interval_s, self._step, frames, last, at + 1)
        else:
            self._pending = None
            self._write(last)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None, "connected"
        self._transport.write(data)


async def serve(port: int, interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(interval_s), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=10)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.interval_ms / 1000))
