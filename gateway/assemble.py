"""Puts a stream's chunks together into the choices of a whole answer. Pure; for long answers that are not streamed."""

from typing import Any

import orjson

from gateway.request import Endpoint


class Assembly:
    """Add chunk payloads in order of arrival; `choices` gives whole choice objects in order of index."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._chat = endpoint is Endpoint.CHAT
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, list[str]] = {}
        self._reasoning: dict[int, list[str]] = {}
        self._calls: dict[int, dict[int, dict[str, Any]]] = {}

    def add(self, payload: bytes) -> None:
        for piece in orjson.loads(payload)["choices"]:
            index = piece["index"]
            choice = self._choices.setdefault(index, {"index": index, "logprobs": None, "finish_reason": None})
            delta = piece.get("delta") or {}
            text = delta.get("content") if self._chat else piece.get("text")
            if text:
                self._texts.setdefault(index, []).append(text)
            if delta.get("reasoning_content"):
                self._reasoning.setdefault(index, []).append(delta["reasoning_content"])
            for fragment in delta.get("tool_calls") or ():
                _add_call(self._calls.setdefault(index, {}), fragment)
            if piece.get("logprobs"):
                choice["logprobs"] = _extended(choice["logprobs"], piece["logprobs"])
            if piece.get("finish_reason"):
                choice["finish_reason"] = piece["finish_reason"]

    def choices(self) -> tuple[dict[str, Any], ...]:
        for index, choice in self._choices.items():
            text = "".join(self._texts.get(index, ()))
            if not self._chat:
                choice["text"] = text
                continue
            choice["message"] = {"role": "assistant", "content": text}
            if index in self._calls:
                calls = self._calls[index]
                choice["message"] |= {"content": text or None, "tool_calls": [calls[at] for at in sorted(calls)]}
            if index in self._reasoning:
                choice["message"]["reasoning_content"] = "".join(self._reasoning[index])
        return tuple(self._choices[index] for index in sorted(self._choices))


def _add_call(calls: dict[int, dict[str, Any]], fragment: dict[str, Any]) -> None:
    """The first fragment of a call names it; later ones only add to its arguments."""
    said = fragment.get("function") or {}
    call = calls.setdefault(
        fragment.get("index") or 0, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = fragment.get("id") or call["id"]
    call["function"]["name"] = said.get("name") or call["function"]["name"]
    call["function"]["arguments"] += said.get("arguments") or ""


def _extended(sofar: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities are lists side by side (one list in chat, four in completions): each grows by its own."""
    if sofar is None:
        return more
    return {
        key: (sofar.get(key) or []) + (more.get(key) or [])
        if isinstance(sofar.get(key) or more.get(key), list)
        else None
        for key in sofar | more
    }
