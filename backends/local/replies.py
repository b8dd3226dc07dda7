"""The JSON that a client reads, key by key in SGLang's order. `server.py` sends it.

`usage` is always the last key of a chunk: a gateway may cut it off as bytes. No HTTP here, and no engine.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from backends.local.live import Delivery
from backends.local.sequence import Failure, TokenLogprob
from backends.local.tokenizer import Tokenizer

Json = dict[str, Any]
DONE = b"[DONE]"


class ReplyShape(Protocol):
    """What differs between chat and plain completions."""

    chunk_object: str
    whole_object: str

    def opening(self) -> Json | None:
        """The part of a choice that a stream begins with, if any."""

    def part(self, text: str) -> Json:
        """The part of a choice that carries new text."""

    def end(self) -> Json:
        """The part of a choice that goes with the finish reason."""

    def whole(self, text: str) -> Json:
        """The part of a choice that carries the whole text."""

    def logprobs(self, tokens: list[TokenLogprob]) -> Json:
        """Log-probabilities of these tokens, in the order they came."""


class ChatShape:
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def part(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def end(self) -> Json:
        return {"delta": {}}

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def logprobs(self, tokens: list[TokenLogprob]) -> Json:
        return {
            "content": [
                self._named(one.token_id, one.logprob)
                | {"top_logprobs": [self._named(token, logprob) for token, logprob in one.top]}
                for one in tokens
            ]
        }

    def _named(self, token: int, logprob: float) -> Json:
        shown = self._tokenizer.token_text(token)
        return {"token": shown.decode(errors="replace"), "bytes": list(shown), "logprob": logprob}


class CompletionShape:
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def opening(self) -> Json | None:
        return None

    def part(self, text: str) -> Json:
        return {"text": text}

    def end(self) -> Json:
        return {"text": ""}

    def whole(self, text: str) -> Json:
        return {"text": text}

    def logprobs(self, tokens: list[TokenLogprob]) -> Json:
        names = [self._name(one.token_id) for one in tokens]
        offsets = []
        for name in names:
            offsets.append(self._offset)
            self._offset += len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [one.logprob for one in tokens],
            "tokens": names,
            "top_logprobs": [{self._name(token): logprob for token, logprob in one.top} for one in tokens],
        }

    def _name(self, token: int) -> str:
        return self._tokenizer.token_text(token).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer's fixed parts; its methods give the bytes to send."""

    rid: str
    model: str
    created: int
    shape: ReplyShape
    with_logprobs: bool

    def opening(self) -> bytes | None:
        part = self.shape.opening()
        return None if part is None else self._chunk([_choice(part, None, None)], None)

    def content(self, delivery: Delivery, *, with_usage: bool) -> bytes:
        logprobs = self.shape.logprobs(delivery.logprobs) if self.with_logprobs else None
        return self._chunk([_choice(self.shape.part(delivery.text), logprobs, None)], delivery if with_usage else None)

    def finish(self, delivery: Delivery) -> bytes:
        return self._chunk([_choice(self.shape.end(), None, delivery)], None)

    def usage(self, delivery: Delivery) -> bytes:
        return self._chunk([], delivery)

    def whole(self, delivery: Delivery) -> bytes:
        logprobs = self.shape.logprobs(delivery.logprobs) if self.with_logprobs else None
        choice = _choice(self.shape.whole(delivery.text), logprobs, delivery)
        return orjson.dumps(self._body(self.shape.whole_object, [choice]) | {"usage": _usage(delivery)})

    def _chunk(self, choices: list[Json], usage: Delivery | None) -> bytes:
        body = self._body(self.shape.chunk_object, choices)
        if usage is not None:
            body["usage"] = _usage(usage)
        return orjson.dumps(body)

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.rid, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def error_body(message: str, *, kind: str, status: int) -> bytes:
    return orjson.dumps(_error(message, kind=kind, status=status))


def error_event(failure: Failure) -> bytes:
    """An error inside a stream, whose status has gone out already."""
    return orjson.dumps({"error": _error(failure.message, kind=failure.kind, status=failure.status)})


def _error(message: str, *, kind: str, status: int) -> Json:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def _choice(part: Json, logprobs: Json | None, ended: Delivery | None) -> Json:
    finish = None if ended is None else ended.finish
    return {
        "index": 0,
        **part,
        "logprobs": logprobs,
        "finish_reason": finish and finish.reason,
        "matched_stop": finish and finish.matched_stop,
    }


def _usage(delivery: Delivery) -> Json:
    return {
        "prompt_tokens": delivery.prompt_tokens,
        "total_tokens": delivery.prompt_tokens + delivery.completion_tokens,
        "completion_tokens": delivery.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": delivery.cached_tokens},
        "reasoning_tokens": 0,
    }
