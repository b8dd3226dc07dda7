"""The payloads of SGLang's HTTP surface, key by key in its own order, for the scripted engine.

A chat stream ends with a finish chunk of its own that has no running usage; a completions stream gives the finish
reason on the chunk of its last token. Running usage never says how much was cached.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Call:
    """One generation as asked for. prompt_tokens is the length of the ids, or the words of a text."""

    rid: str
    chat: bool
    model: str
    created: int
    prompt_tokens: int
    max_tokens: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    running_usage: bool
    rank: int = 0


def usage(call: Call, produced: int, overrides: Mapping[str, int], *, final: bool) -> dict[str, Any]:
    prompt = overrides.get("prompt_tokens", call.prompt_tokens)
    completion = overrides.get("completion_tokens", produced)
    cached = overrides.get("cached_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "total_tokens": overrides.get("total_tokens", prompt + completion),
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached} if final else None,
        "reasoning_tokens": overrides.get("reasoning_tokens", 0),
    }


def role_chunk(call: Call) -> bytes:
    delta = {"reasoning_content": None, "role": "assistant", "content": ""}
    return _event(call, [_choice("delta", delta, finish_reason=None)], None)


def token_chunk(call: Call, text: str, running: dict[str, Any] | None, *, finish_reason: str | None = None) -> bytes:
    key, said = ("delta", {"reasoning_content": None, "content": text}) if call.chat else ("text", text)
    return _event(call, [_choice(key, said, finish_reason=finish_reason)], running)


def finish_chunk(call: Call, finish_reason: str) -> bytes:
    key, said = ("delta", {"reasoning_content": None}) if call.chat else ("text", "")
    return _event(call, [_choice(key, said, finish_reason=finish_reason)], None)


def usage_chunk(call: Call, final: dict[str, Any]) -> bytes:
    return _event(call, [], final)


def in_band_error(message: str) -> bytes:
    return b"data: " + orjson.dumps({"error": error(message, "InternalServerError", 500)}) + b"\n\n"


def error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def completion(call: Call, text: str, finish_reason: str, final: dict[str, Any] | None) -> bytes:
    """The body of an answer that is not streamed."""
    message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
    key, said = ("message", message) if call.chat else ("text", text)
    body: dict[str, Any] = {
        "id": call.rid,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": [_choice(key, said, finish_reason=finish_reason)],
    }
    if final is not None:
        body["usage"] = final
    body["metadata"] = {"weight_version": "default"}
    return orjson.dumps(body)


def _choice(key: str, said: object, *, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, key: said, "logprobs": None, "finish_reason": finish_reason, "matched_stop": None}


def _event(call: Call, choices: list[dict[str, Any]], running: dict[str, Any] | None) -> bytes:
    chunk: dict[str, Any] = {
        "id": call.rid,
        "object": "chat.completion.chunk" if call.chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }
    if running is not None:
        chunk["usage"] = running
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
