"""Puts a stream's chunks together into the choices of a whole answer. Pure; for long answers that are not streamed.

Log-probabilities are most of an answer that has them. They are kept as the JSON that they are and go out as it: as
objects of Python's they would take five times as much.
"""

from io import StringIO
from typing import Any

import orjson

from gateway.request import Endpoint


class Assembly:
    """Add chunk payloads in order of arrival; `choices` gives whole choice objects in order of index, for orjson.

    taken_bytes: what texts, log-probabilities and the arguments of calls take.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._chat = endpoint is Endpoint.CHAT
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, StringIO] = {}
        self._reasoning: dict[int, StringIO] = {}
        self._calls: dict[int, dict[int, dict[str, Any]]] = {}
        self.taken_bytes = 0

    def add(self, payload: bytes) -> None:
        for piece in orjson.loads(payload)["choices"]:
            index = piece["index"]
            choice = self._choices.setdefault(index, {"index": index, "logprobs": None, "finish_reason": None})
            delta = piece.get("delta") or {}
            text = delta.get("content") if self._chat else piece.get("text")
            if text:
                self._write(self._texts, index, text)
            if delta.get("reasoning_content"):
                self._write(self._reasoning, index, delta["reasoning_content"])
            for fragment in delta.get("tool_calls") or ():
                self.taken_bytes += _add_call(self._calls.setdefault(index, {}), fragment)
            if piece.get("logprobs"):
                choice["logprobs"] = self._extended(choice["logprobs"] or {}, piece["logprobs"])
            if piece.get("finish_reason"):
                choice["finish_reason"] = piece["finish_reason"]

    def cut_short(self) -> None:
        """Whatever has not finished ends here."""
        for choice in self._choices.values():
            choice["finish_reason"] = choice["finish_reason"] or "length"

    def choices(self) -> tuple[dict[str, Any], ...]:
        for index, choice in self._choices.items():
            text = self._texts[index].getvalue() if index in self._texts else ""
            if not self._chat:
                choice["text"] = text
                continue
            choice["message"] = {"role": "assistant", "content": text}
            if index in self._calls:
                calls = self._calls[index]
                choice["message"] |= {"content": text or None, "tool_calls": [calls[at] for at in sorted(calls)]}
            if index in self._reasoning:
                choice["message"]["reasoning_content"] = self._reasoning[index].getvalue()
        return tuple(self._choices[index] for index in sorted(self._choices))

    def _write(self, texts: dict[int, StringIO], index: int, text: str) -> None:
        if index not in texts:
            texts[index] = StringIO()
        texts[index].write(text)
        self.taken_bytes += len(text)

    def _extended(self, sofar: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        """Log-probabilities are lists side by side (one list in chat, four in completions): each grows by its own."""
        for key, some in more.items():
            sofar.setdefault(key, None)
            if not isinstance(some, list):
                continue
            if sofar[key] is None:
                sofar[key] = []
            if some:
                written = orjson.dumps(some)[1:-1]
                sofar[key].append(orjson.Fragment(written))
                self.taken_bytes += len(written)
        return sofar


def _add_call(calls: dict[int, dict[str, Any]], fragment: dict[str, Any]) -> int:
    """The first fragment of a call names it; later ones only add to its arguments. By how much these grew."""
    said = fragment.get("function") or {}
    call = calls.setdefault(
        fragment.get("index") or 0, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = fragment.get("id") or call["id"]
    call["function"]["name"] = said.get("name") or call["function"]["name"]
    more = said.get("arguments") or ""
    call["function"]["arguments"] += more
    return len(more)
