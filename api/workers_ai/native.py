"""The native stream of /ai/run: `{"response":"…","p":"…"}` frames, cut out of the engine's chunks as bytes.

The text's JSON literal is copied, never decoded: no character can be split or changed, and no chunk is parsed but those
of an unusual shape and the last. `p` is padding of random length: token lengths can't be told from the size of frames.
"""

import re
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

import orjson

from api.sse import DONE
from api.tally import usage_object
from api.tool_calls import native_calls
from billing.money import neurons_decimal
from gateway.assemble import Assembly
from gateway.request import Endpoint
from gateway.stream import Stream

# A quote inside a JSON string is always escaped, so `"content":"` can only be a key and the start of its value.
_LITERAL: Final = re.compile(rb'"(?:content|text)":("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_THINKS: Final = b'"reasoning_content":"'
_THOUGHT: Final = re.compile(rb'"reasoning_content":("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)
_UNFINISHED: Final = b'"finish_reason":null'
_EMPTY: Final = b'""'

_ALPHABET: Final = b"abdefghijklmnoprstuvxyz1234567890"
_PADDING_BITS: Final = 5
_TAILS: Final = tuple(b',"p":"%b"}\n\n' % _ALPHABET[: length + 1] for length in range(1 << _PADDING_BITS))


async def native_frames(stream: Stream, *, with_usage: bool) -> AsyncIterator[bytes]:
    """Frames of thoughts and of text, one last frame with finish reason and usage, [DONE]."""
    finish_reason: str | None = None
    async for payload in stream:
        literal, finished = read_chunk(payload)
        finish_reason = finished or finish_reason
        if _THINKS in payload and (thought := read_thought(payload)) != _EMPTY:
            yield b'data: {"response":"","reasoning_content":' + thought + _tail()
        if literal != _EMPTY:
            yield b'data: {"response":' + literal + _tail()
    yield _last_frame(stream, finish_reason, with_usage=with_usage)
    yield DONE


async def native_frames_with_tools(stream: Stream, *, with_usage: bool) -> AsyncIterator[bytes]:
    """The same of an answer that may call tools: each call stands whole in one frame, before the last one."""
    finish_reason: str | None = None
    assembly = Assembly(Endpoint.CHAT)
    async for payload in stream:
        literal, finished = read_chunk(payload)
        finish_reason = finished or finish_reason
        if _THINKS in payload and (thought := read_thought(payload)) != _EMPTY:
            yield b'data: {"response":"","reasoning_content":' + thought + _tail()
        if literal != _EMPTY:
            yield b'data: {"response":' + literal + _tail()
        elif b'"tool_calls":[' in payload:
            assembly.add(payload)
    for choice in assembly.choices():
        for index, call in enumerate(native_calls(choice["message"])):
            # Clients that know OpenAI's fragments, too, tell calls apart by their index.
            yield b"data: " + orjson.dumps({"response": "", "tool_calls": [{"index": index, **call}]})[:-1] + _tail()
    yield _last_frame(stream, finish_reason, with_usage=with_usage)
    yield DONE


def read_thought(payload: bytes) -> bytes:
    """What a model thinks before it answers, as a JSON string literal. Whole answers have it beside their text."""
    found = _THOUGHT.search(payload)
    return _EMPTY if found is None else found[1]


def read_chunk(payload: bytes) -> tuple[bytes, str | None]:
    """The chunk's text as a JSON string literal (`""` if it has none), and its finish reason."""
    found = _LITERAL.search(payload)
    if found is not None and _UNFINISHED in payload:
        return found[1], None
    choices = orjson.loads(payload).get("choices") or [{}]
    choice = choices[0]
    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    return orjson.dumps(text), choice.get("finish_reason")


def _last_frame(stream: Stream, finish_reason: str | None, *, with_usage: bool) -> bytes:
    last: dict[str, Any] = {"response": "", "finish_reason": finish_reason}
    if with_usage:
        assert stream.settlement is not None, "a stream that ended well is settled"
        last["usage"] = usage_object(stream.settlement)
        last["neurons"] = orjson.Fragment(neurons_decimal(stream.settlement.neurons_micro))
    return b"data: " + orjson.dumps(last)[:-1] + _tail()


def _tail() -> bytes:
    return _TAILS[secrets.randbits(_PADDING_BITS)]
