"""A streamed response, event by event: every opening has its end, and sequence numbers have no gaps. Pure.

    created, in_progress
    for each text   output_item.added, content_part.added, …delta*, …done, content_part.done, output_item.done
    for each call   output_item.added, function_call_arguments.delta*, ….done, output_item.done
    completed | incomplete | failed

The route hands in the engine's chunks and the settlement. What the model thinks, says and calls are items apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from api.openai.responses_schemas import ResponsesBody
from api.openai.responses_translate import (
    call_id_of,
    call_item,
    message_id,
    message_item,
    reasoning_id,
    reasoning_item,
    reasoning_part,
    response_object,
    status_of,
    text_part,
)
from gateway.request import GenerationRequest, Settlement


class Kind(Enum):
    """What an item is, as the name of its text's events."""

    REASONING = "reasoning_text"
    MESSAGE = "output_text"
    CALL = "function_call_arguments"


@dataclass(slots=True)
class _Item:
    """The item that text is added to now. Its pieces are as many as the answer's tokens, which are capped."""

    kind: Kind
    id: str
    index: int
    pieces: list[str] = field(default_factory=list)
    # Of a call: its id, its function, and its place among the calls of the answer.
    call_id: str = ""
    name: str = ""
    call_index: int = 0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> dict[str, Any]:
        return text_part(self.text) if self.kind is Kind.MESSAGE else reasoning_part(self.text)

    def shown(self, *, status: str) -> dict[str, Any]:
        """The item as it is now; while it is being written it is told without its text."""
        begun = status == "in_progress"
        if self.kind is Kind.CALL:
            return call_item(self.id, self.call_id, self.name, "" if begun else self.text, status=status)
        content = [] if begun else [self.part()]
        make = message_item if self.kind is Kind.MESSAGE else reasoning_item
        return make(self.id, content, status=status)


class ResponseEvents:
    """Call `opening`, then `chunk` for each payload, then `ending` or `failing`; each gives the frames to send."""

    def __init__(self, request: GenerationRequest, body: ResponsesBody, created: int) -> None:
        self._request = request
        self._body = body
        self._created = created
        self._sent = 0
        self._ended: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._finish_reason: str | None = None
        self.final: dict[str, Any] | None = None

    def opening(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._frame(name, response=self._response("in_progress"))

    def chunk(self, payload: bytes) -> Iterator[bytes]:
        for choice in orjson.loads(payload)["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("reasoning_content"):
                yield from self._say(Kind.REASONING, delta["reasoning_content"])
            if delta.get("content"):
                yield from self._say(Kind.MESSAGE, delta["content"])
            for fragment in delta.get("tool_calls") or ():
                yield from self._call(fragment)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def ending(self, settlement: Settlement) -> Iterator[bytes]:
        """An answer without a word or a call still has its message."""
        status = status_of(self._finish_reason)
        if self._item is None or self._item.kind is Kind.REASONING:
            yield from self._open(Kind.MESSAGE)
        yield from self._close(status)
        self.final = self._response(status, settlement=settlement)
        yield self._frame(status, response=self.final)

    def failing(self, error: dict[str, Any]) -> Iterator[bytes]:
        """What was said until then stays in the response, marked as incomplete."""
        self._finish_reason = None
        if self._item is not None:
            self._ended.append(self._item.shown(status="incomplete"))
        yield self._frame("failed", response=self._response("failed", error=error))

    def _say(self, kind: Kind, text: str) -> Iterator[bytes]:
        if self._item is None or self._item.kind is not kind:
            yield from self._open(kind)
        item = self._item
        assert item is not None, "it was opened"
        item.pieces.append(text)
        yield self._text_frame(item, "delta", delta=text)

    def _call(self, fragment: dict[str, Any]) -> Iterator[bytes]:
        """A fragment of another index begins a call; all add to its arguments."""
        said = fragment.get("function") or {}
        index = fragment.get("index") or 0
        item = self._item
        if item is None or item.kind is not Kind.CALL or item.call_index != index:
            yield from self._close("completed")
            at = len(self._ended)
            item = self._item = _Item(Kind.CALL, call_id_of(self._request.id, at), at, call_index=index)
            item.call_id, item.name = fragment.get("id") or item.id, said.get("name") or ""
            yield self._frame("output_item.added", output_index=at, item=item.shown(status="in_progress"))
        if said.get("arguments"):
            item.pieces.append(said["arguments"])
            yield self._arguments_frame(item, "delta", delta=said["arguments"])

    def _open(self, kind: Kind) -> Iterator[bytes]:
        yield from self._close("completed")
        index = len(self._ended)
        make_id = message_id if kind is Kind.MESSAGE else reasoning_id
        self._item = item = _Item(kind, make_id(self._request.id, index), index)
        yield self._frame("output_item.added", output_index=index, item=item.shown(status="in_progress"))
        yield self._part_frame(item, "added")

    def _close(self, status: str) -> Iterator[bytes]:
        item, self._item = self._item, None
        if item is None:
            return
        if item.kind is Kind.CALL:
            yield self._arguments_frame(item, "done", arguments=item.text, name=item.name)
        else:
            yield self._text_frame(item, "done", text=item.text)
            yield self._part_frame(item, "done")
        shown = item.shown(status=status)
        self._ended.append(shown)
        yield self._frame("output_item.done", output_index=item.index, item=shown)

    def _arguments_frame(self, item: _Item, event: str, **fields: str) -> bytes:
        return self._frame(f"{item.kind.value}.{event}", item_id=item.id, output_index=item.index, **fields)

    def _text_frame(self, item: _Item, name: str, **fields: str) -> bytes:
        more: dict[str, Any] = {"logprobs": []} if item.kind is Kind.MESSAGE else {}
        return self._frame(f"{item.kind.value}.{name}", **_place(item), **fields, **more)

    def _part_frame(self, item: _Item, name: str) -> bytes:
        return self._frame(f"content_part.{name}", **_place(item), part=item.part())

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        return response_object(
            self._request,
            self._body,
            self._created,
            status=status,
            output=list(self._ended),
            finish_reason=self._finish_reason,
            **more,
        )

    def _frame(self, event: str, **fields: Any) -> bytes:
        kind = f"response.{event}"
        data = orjson.dumps({"type": kind, "sequence_number": self._sent, **fields})
        self._sent += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _place(item: _Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}
