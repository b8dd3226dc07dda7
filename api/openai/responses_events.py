"""A streamed response, event by event: every opening has its end, and sequence numbers have no gaps. Pure.

    created, in_progress
    for each item   output_item.added, content_part.added, …delta*, …done, content_part.done, output_item.done
    completed | incomplete | failed

The route hands in the engine's chunks and the settlement. What the model thinks and what it says are items apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from api.openai.responses_schemas import ResponsesBody
from api.openai.responses_translate import (
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


@dataclass(slots=True)
class _Item:
    """The item that text is added to now. Its pieces are as many as the answer's tokens, which are capped."""

    kind: Kind
    id: str
    index: int
    pieces: list[str] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        return text_part(text) if self.kind is Kind.MESSAGE else reasoning_part(text)

    def shown(self, content: list[dict[str, Any]], *, status: str) -> dict[str, Any]:
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
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def ending(self, settlement: Settlement) -> Iterator[bytes]:
        """An answer without a word still has its message."""
        status = status_of(self._finish_reason)
        if self._item is None or self._item.kind is not Kind.MESSAGE:
            yield from self._open(Kind.MESSAGE)
        yield from self._close(status)
        yield self._frame(status, response=self._response(status, settlement=settlement))

    def failing(self, error: dict[str, Any]) -> Iterator[bytes]:
        """What was said until then stays in the response, marked as incomplete."""
        self._finish_reason = None
        if self._item is not None:
            self._ended.append(self._item.shown([self._item.part()], status="incomplete"))
        yield self._frame("failed", response=self._response("failed", error=error))

    def _say(self, kind: Kind, text: str) -> Iterator[bytes]:
        if self._item is None or self._item.kind is not kind:
            yield from self._open(kind)
        item = self._item
        assert item is not None, "it was opened"
        item.pieces.append(text)
        yield self._text_frame(item, "delta", delta=text)

    def _open(self, kind: Kind) -> Iterator[bytes]:
        yield from self._close("completed")
        index = len(self._ended)
        make_id = message_id if kind is Kind.MESSAGE else reasoning_id
        self._item = item = _Item(kind, make_id(self._request.id, index), index)
        yield self._frame("output_item.added", output_index=index, item=item.shown([], status="in_progress"))
        yield self._part_frame(item, "added")

    def _close(self, status: str) -> Iterator[bytes]:
        item, self._item = self._item, None
        if item is None:
            return
        part = item.part()
        yield self._text_frame(item, "done", text=part["text"])
        yield self._part_frame(item, "done")
        shown = item.shown([part], status=status)
        self._ended.append(shown)
        yield self._frame("output_item.done", output_index=item.index, item=shown)

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

    def _frame(self, name: str, **fields: Any) -> bytes:
        kind = f"response.{name}"
        data = orjson.dumps({"type": kind, "sequence_number": self._sent, **fields})
        self._sent += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _place(item: _Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}
