"""The tool calls of an answer, in the shapes that the dialects tell them. Pure.

Engines give OpenAI's objects: {id, type, function: {name, arguments}}, with arguments as JSON text.
"""

from collections.abc import Mapping
from typing import Any

import orjson


def whole_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """OpenAI's shape, and nothing that an engine adds to it."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
        }
        for call in message.get("tool_calls") or ()
    ]


def native_calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Workers AI's native shape: arguments as the object that they are. Of a call that was cut, the text there is.

    With the id beside it, which that shape has not: a client that sends the call back then names it as it was named.
    """
    return [
        {"id": call["id"], "name": call["function"]["name"], "arguments": _object(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]


def _object(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
