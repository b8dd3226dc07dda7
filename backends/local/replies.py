"""The JSON that a client reads, key by key in SGLang's order. surface.py sends it.

`usage` is always the last key of a chunk: a gateway may cut it off as bytes. No HTTP here, and no engine.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from backends.local.live import Delivery
from backends.local.sequence import Failure, FinishReason, TokenLogprob
from backends.local.tokenizer import Tokenizer
from backends.local.tool_calls import ArgumentsGrew, CallBegan, Piece, Said, ToolCallReader

Json = dict[str, Any]
DONE = b"[DONE]"


class ReplyShape(Protocol):
    """What differs between chat and plain completions."""

    chunk_object: str
    whole_object: str

    def opening(self) -> Json | None:
        """The part of a choice that a stream begins with, if any."""

    def parts(self, text: str) -> list[Json]:
        """The parts of choices that carry new text; none while it isn't certain what the text is."""

    def last_parts(self) -> list[Json]:
        """What was kept back until the end."""

    def end(self) -> Json:
        """The part of a choice that goes with the finish reason."""

    def whole(self, text: str) -> Json:
        """The part of a choice that carries the whole text."""

    def finish_reason(self, reason: FinishReason) -> str:
        """The engine's reason in this shape's words."""

    def logprobs(self, tokens: list[TokenLogprob]) -> Json:
        """Log-probabilities of these tokens, in the order they came."""


class ChatShape:
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def parts(self, text: str) -> list[Json]:
        return [{"delta": {"content": text}}]

    def last_parts(self) -> list[Json]:
        return []

    def finish_reason(self, reason: FinishReason) -> str:
        return reason.value

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


class ToolShape(ChatShape):
    """A chat whose answer may hold tool calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._reader = ToolCallReader()

    def parts(self, text: str) -> list[Json]:
        return [{"delta": _delta(piece)} for piece in self._reader.read(text)]

    def last_parts(self) -> list[Json]:
        return [{"delta": _delta(piece)} for piece in self._reader.rest()]

    def finish_reason(self, reason: FinishReason) -> str:
        if reason is not FinishReason.STOP:
            return reason.value
        # A client's own stop string may cut a call: half a call is no call.
        return "length" if self._reader.unfinished else "tool_calls" if self._reader.calls else reason.value

    def whole(self, text: str) -> Json:
        said: list[str] = []
        calls: list[Json] = []
        for piece in (*self._reader.read(text), *self._reader.rest()):
            match piece:
                case Said():
                    said.append(piece.text)
                case CallBegan():
                    calls.append(_call(piece))
                case ArgumentsGrew():
                    calls[piece.index]["function"]["arguments"] += piece.text
        content = "".join(said)
        return {
            "message": {"role": "assistant", "content": content or (None if calls else ""), "tool_calls": calls or None}
        }


class CompletionShape:
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def opening(self) -> Json | None:
        return None

    def parts(self, text: str) -> list[Json]:
        return [{"text": text}]

    def last_parts(self) -> list[Json]:
        return []

    def finish_reason(self, reason: FinishReason) -> str:
        return reason.value

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
        return None if part is None else self._chunk([_choice(part, None)], None)

    def content(self, delivery: Delivery, *, with_usage: bool) -> list[bytes]:
        """The chunks of a delivery; usage goes with the last of them, log-probabilities with the first."""
        logprobs = self.shape.logprobs(delivery.logprobs) if self.with_logprobs else None
        parts = self.shape.parts(delivery.text)
        if not parts and logprobs is not None:
            parts = [self.shape.end()]
        last = len(parts) - 1
        return [
            self._chunk([_choice(part, None if at else logprobs)], delivery if with_usage and at == last else None)
            for at, part in enumerate(parts)
        ]

    def finish(self, delivery: Delivery) -> list[bytes]:
        kept_back = [self._chunk([_choice(part, None)], None) for part in self.shape.last_parts()]
        return [*kept_back, self._chunk([_choice(self.shape.end(), None, self._ended(delivery))], None)]

    def usage(self, delivery: Delivery) -> bytes:
        return self._chunk([], delivery)

    def whole(self, delivery: Delivery) -> bytes:
        logprobs = self.shape.logprobs(delivery.logprobs) if self.with_logprobs else None
        whole = self.shape.whole(delivery.text)
        choice = _choice(whole, logprobs, self._ended(delivery))
        return orjson.dumps(self._body(self.shape.whole_object, [choice]) | {"usage": _usage(delivery)})

    def _ended(self, delivery: Delivery) -> Json:
        finish = delivery.finish
        assert finish is not None, "the last delivery says how it ended"
        return {"finish_reason": self.shape.finish_reason(finish.reason), "matched_stop": finish.matched_stop}

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


def _choice(part: Json, logprobs: Json | None, ended: Json | None = None) -> Json:
    return {"index": 0, **part, "logprobs": logprobs, **(ended or {"finish_reason": None, "matched_stop": None})}


def _call(began: CallBegan) -> Json:
    return {"id": began.id, "index": began.index, "type": "function", "function": {"name": began.name, "arguments": ""}}


def _delta(piece: Piece) -> Json:
    match piece:
        case Said():
            return {"content": piece.text}
        case CallBegan():
            return {"tool_calls": [_call(piece)]}
        case ArgumentsGrew():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _usage(delivery: Delivery) -> Json:
    return {
        "prompt_tokens": delivery.prompt_tokens,
        "total_tokens": delivery.prompt_tokens + delivery.completion_tokens,
        "completion_tokens": delivery.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": delivery.cached_tokens},
        "reasoning_tokens": 0,
    }
