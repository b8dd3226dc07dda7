"""The payloads of SGLang's HTTP surface that the gateway reads and writes, and the bytes of its streams.

Used by client.py and the gateway. A stream's chunk is cut as bytes: SGLang writes compact JSON with `usage` as the last
key, so the running usage comes off without a parse; whatever looks otherwise is parsed (and costs more).
"""

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from backends.errors import EngineBroke, EngineIntegrityAbort
from backends.page_tags import ABORT_MESSAGE, ABORT_STATUS

DONE = b"[DONE]"
# SGLang rounds the used share of a pool.
_SHARE_STEP = 1e-4
_USAGE_KEY = b',"usage":'
# As SGLang writes it; whatever looks otherwise is searched key by key.
_USAGE = re.compile(
    rb'{"prompt_tokens":(\d+),"total_tokens":\d+,"completion_tokens":(\d+),'
    rb'"prompt_tokens_details":(?:null|{"cached_tokens":(\d+)}),"reasoning_tokens":(\d+)}'
)
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens":(\d+)')
_REASONING_TOKENS = re.compile(rb'"reasoning_tokens":(\d+)')
# Quotes inside a JSON string are escaped, so these keys can't be matched in generated text.
_FINISH_REASON = re.compile(rb'"finish_reason":"([a-z_]+)"')

_MATCHED_STOP = b',"matched_stop":'
_NO_MATCHED_STOP = _MATCHED_STOP + b"null"
_MATCHED_STOP_VALUE = re.compile(_MATCHED_STOP + rb'(?:-?\d+|"[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)


class EngineUsage(NamedTuple):
    """Token counts as the engine reports them for one call; cached and reasoning are parts of prompt and completion."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


class Chunk(NamedTuple):
    """One event of a stream. body: the JSON object without usage, None for an event that only carries usage."""

    body: bytes | None
    usage: EngineUsage | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Loads:
    """`GET /v1/loads` of one data-parallel rank. Tokens; used leaves evictable cache out.

    A hybrid model has several pools. used_tokens is then of the one that is fullest, as if all were as full.
    worked: grows with each step, where the engine says so. told_at: when the engine wrote this, by its own clock, None
    where it doesn't say: it gives the same report again until it has written another. unplaced: of those that wait, who
    waits for pages or a slot, as far as the engine tells them apart.
    """

    total_tokens: int
    used_tokens: int
    running: int
    waiting: int
    running_max: int
    worked: float = 0.0
    told_at: float | None = None
    unplaced: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The part of `GET /server_info` that decisions need. epoch: changes when the engine restarts, if it says.

    conservativeness: scales SGLang's reserve for running requests.
    """

    page_tokens: int
    total_tokens: int
    context_tokens: int | None
    kv_cache_dtype: str
    epoch: str | None
    conservativeness: float = 1.0


def _count(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.search(text)
    return int(found.group(1)) if found else 0


def _usage_of_bytes(text: bytes) -> EngineUsage | None:
    """Runs once a chunk."""
    whole = _USAGE.fullmatch(text)
    if whole is not None:
        prompt, completion, cached, reasoning = whole.groups()
        return EngineUsage(int(prompt), int(cached or 0), int(completion), int(reasoning))
    if not _COMPLETION_TOKENS.search(text):
        return None  # counts that are no counts: the engine does not say
    return EngineUsage(
        prompt=_count(_PROMPT_TOKENS, text),
        cached=_count(_CACHED_TOKENS, text),
        completion=_count(_COMPLETION_TOKENS, text),
        reasoning=_count(_REASONING_TOKENS, text),
    )


def usage_of(fields: Any) -> EngineUsage | None:
    """Usage from a parsed answer; None if it carries none. An explicit 0 is 0.

    Raises EngineBroke if a count is no count.
    """
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise EngineBroke("the engine's usage is not an object")
    details = fields.get("prompt_tokens_details") or {}
    return EngineUsage(
        prompt=_counted(fields, "prompt_tokens"),
        cached=_counted(details, "cached_tokens"),
        completion=_counted(fields, "completion_tokens"),
        reasoning=_counted(fields, "reasoning_tokens"),
    )


def _counted(fields: Any, name: str) -> int:
    count = (fields.get(name) if isinstance(fields, dict) else None) or 0
    if type(count) is not int or count < 0:
        raise EngineBroke(f"the engine's usage has a {name} that is no count")
    return count


def finished_choice(fields: dict[str, Any]) -> dict[str, Any]:
    """The one choice of a whole answer. Raises EngineBroke if it is not there, says nothing, or was given up."""
    choices = fields.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not (
        isinstance(choice.get("message"), dict) or isinstance(choice.get("text"), str)
    ):
        raise EngineBroke("the engine's answer has no choice with a message or a text")
    if not isinstance(choice.get("finish_reason"), str) or choice["finish_reason"] == "abort":
        raise EngineBroke(f"the engine gave up the request: finish_reason {choice.get('finish_reason')!r:.50}")
    return choice


def said_in(fields: dict[str, Any]) -> str | None:
    """All that a whole answer's one choice says, thoughts and calls with it; None if it is no choice."""
    choices = fields.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return None
    message = choice.get("message")
    if not isinstance(message, dict):
        message = {}
    calls = message.get("tool_calls") or ()
    parts = [choice.get("text"), message.get("reasoning_content"), message.get("content")]
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        parts += [function.get("name"), function.get("arguments")] if isinstance(function, dict) else []
    return "".join(part for part in parts if isinstance(part, str))


def read_chunk(payload: bytes) -> Chunk:
    """Cut one event's JSON into what the client sees and what we count.

    Raises EngineBroke on an in-band error or on something that is no JSON object, EngineIntegrityAbort where the error
    says that a page of the cache changed hands.
    """
    at = payload.rfind(_USAGE_KEY)
    if at > 0 and payload.endswith((b"}}", b"null}")):
        tail = payload[at + len(_USAGE_KEY) : -1]
        usage = None if tail == b"null" else _usage_of_bytes(tail)
        body = payload[:at] + b"}"
    elif b'"usage"' in payload or not payload.startswith(b'{"id"'):
        return _read_chunk_by_parsing(payload)
    else:
        usage, body = None, payload
    if b'"choices":[]' in body:
        return Chunk(None, usage, None)
    # It says which stop string or token ended the answer: SGLang's own, and in no dialect of ours.
    body = body.replace(_NO_MATCHED_STOP, b"")
    if _MATCHED_STOP in body:
        body = _MATCHED_STOP_VALUE.sub(b"", body)
    finish = _FINISH_REASON.search(body)
    return Chunk(body, usage, finish.group(1).decode() if finish else None)


def _read_chunk_by_parsing(payload: bytes) -> Chunk:
    try:
        fields = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise EngineBroke(f"the engine sent an event of {len(payload)} bytes that is not JSON") from error
    if not isinstance(fields, dict) or "choices" not in fields:
        message = fields.get("message") or fields.get("error") if isinstance(fields, dict) else None
        if isinstance(message, dict) and (message.get("code"), message.get("message")) == (ABORT_STATUS, ABORT_MESSAGE):
            raise EngineIntegrityAbort(ABORT_MESSAGE)
        raise EngineBroke(f"the engine sent an error in its stream: {message!r:.500}")
    usage = usage_of(fields.pop("usage", None))
    if not fields["choices"]:
        return Chunk(None, usage, None)
    if not isinstance(fields["choices"], list) or not isinstance(fields["choices"][0], dict):
        raise EngineBroke("the engine sent an event whose choices are no choices")
    fields["choices"][0].pop("matched_stop", None)
    return Chunk(orjson.dumps(fields), usage, fields["choices"][0].get("finish_reason"))


def read_loads(fields: dict[str, Any], rank: int | None = None) -> Loads:
    """rank: which of several; None: there is one. Raises EngineBroke if the report lacks what admission needs."""
    try:
        load = next(load for load in fields["loads"] if rank is None or load["dp_rank"] == rank)
        total = int(load["max_total_num_tokens"])
        return Loads(
            total_tokens=total,
            used_tokens=_of_fullest_pool(int(load["num_used_tokens"]), total, float(load.get("token_usage") or 0.0)),
            running=int(load["num_running_reqs"]),
            waiting=int(load["num_waiting_reqs"]),
            running_max=int(load.get("max_running_requests") or 1 << 30),
            worked=(load.get("total_prefill_busy_us") or 0) + sum((load.get("decode_moments") or ())[:1]),
            told_at=_told_at(load.get("timestamp")),
            unplaced=_unplaced(load),
        )
    except (KeyError, StopIteration, TypeError, ValueError) as error:
        raise EngineBroke("the engine's load report lacks a rank or a field that admission needs") from error


def read_start_parts(fields: dict[str, Any]) -> dict[str, float]:
    """From the server info. What is no number of seconds is left out."""
    parts = fields.get("start_seconds")
    if not isinstance(parts, dict):
        return {}
    return {part: float(seconds) for part, seconds in parts.items() if isinstance(seconds, int | float)}


def is_busy(fields: dict[str, Any]) -> bool:
    """Does anything run or wait, on any rank? Raises EngineBroke if the load report does not say."""
    try:
        return any(load["num_running_reqs"] or load["num_waiting_reqs"] for load in fields["loads"])
    except (KeyError, TypeError) as error:
        raise EngineBroke("the engine's load report does not say what runs") from error


def _told_at(timestamp: Any) -> float | None:
    """What is no time says nothing, and admission goes on without it."""
    return float(timestamp) if isinstance(timestamp, int | float) and timestamp > 0 else None


def _unplaced(load: dict[str, Any]) -> int:
    """As our own engine says. SGLang's waiting queue is of those that its scheduler has looked at, and in a decode half
    who could be received and has no pages is beside it; who waits for the other half of a pair is elsewhere.
    """
    queues = load.get("queues") or {}
    if "unplaced" in queues:
        return int(queues["unplaced"])
    return int(queues.get("waiting", load["num_waiting_reqs"])) + int(queues.get("prealloc_ready") or 0)


def _of_fullest_pool(used: int, total: int, share: float) -> int:
    """share: of the fullest pool, in whole ten-thousandths, so that a smaller difference is none."""
    return math.ceil(share * total) if share * total > used + total * _SHARE_STEP else used


def read_server_info(fields: dict[str, Any]) -> ServerInfo:
    """Raises EngineBroke if the engine does not say its page size or capacity."""
    try:
        context = fields.get("context_length")
        return ServerInfo(
            page_tokens=int(fields["page_size"]),
            total_tokens=int(fields["max_total_num_tokens"]),
            context_tokens=int(context) if context else None,
            kv_cache_dtype=str(fields.get("kv_cache_dtype") or "auto"),
            epoch=str(fields["epoch"]) if fields.get("epoch") else None,
            conservativeness=float(fields.get("schedule_conservativeness") or 1.0),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineBroke("the engine's server info lacks its page size or capacity") from error
