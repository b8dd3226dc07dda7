"""Chat messages as clients send them → the plain text turns that the gateway renders. Both dialects use it.

Everything a client may write is brought to one form: content as text, null or parts, `developer` for system, and
system turns anywhere. What can't be served (pictures, sound) is refused with the path of the part.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from api.errors import InputInvalid, ParameterUnsupported
from gateway.tool_ids import as_the_model_wrote

MESSAGES_MAX: Final = 2_048
_TOOL_CALLS_MAX: Final = 128
_ROLES: Final = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
_TEXT_KEYS: Final = {"text": "text", "input_text": "text", "refusal": "refusal"}
_OTHER_PARTS: Final = frozenset({"image_url", "input_audio", "file", "image", "audio", "video_url", "input_image"})

Turn = dict[str, Any]


def conversation(messages: list[dict[str, Any]]) -> tuple[Turn, ...]:
    """The turns, with all system text in one turn at the front: many chat templates refuse it anywhere else.

    Raises InputInvalid or ParameterUnsupported, with the path from the top of the body.
    """
    if not messages:
        raise InputInvalid(("messages",), "must hold at least one message.")
    if len(messages) > MESSAGES_MAX:
        raise InputInvalid(("messages",), f"must hold at most {MESSAGES_MAX} messages.")
    turns = [_turn(message, index) for index, message in enumerate(messages)]
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    if not system:
        return tuple(turns)
    others = (turn for turn in turns if turn["role"] != "system")
    return ({"role": "system", "content": "\n\n".join(system)}, *others)


def _turn(message: Mapping[str, Any], index: int) -> Turn:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InputInvalid(("messages", index, "role"), f"must be one of {', '.join(_ROLES)}.")
    turn: Turn = {"role": _ROLES[role], "content": ""}
    calls, called = message.get("tool_calls"), message.get("function_call")
    if calls is not None and calls != []:
        turn["tool_calls"] = _tool_calls(calls, index)
    elif called is not None:  # the older form, in conversations that began with it
        if not isinstance(called, dict):
            raise InputInvalid(("messages", index, "function_call"), "must be an object: {name, arguments}.")
        turn["tool_calls"] = [_tool_call(called, ("messages", index, "function_call"))]
    elif "content" not in message:
        raise InputInvalid(("messages", index, "content"), "is required: text, null or a list of text parts.")
    turn["content"] = _text(message.get("content"), index)
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InputInvalid(("messages", index, name), "must be a string.")
        turn[name] = as_the_model_wrote(value) if name == "tool_call_id" else value
    return turn


def _text(content: object, index: int) -> str:
    """Text of any form of content; null is the empty text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InputInvalid(("messages", index, "content"), "must be text, null or a list of text parts.")
    return "".join(_part_text(part, ("messages", index, "content", at)) for at, part in enumerate(content))


def _part_text(part: object, path: tuple[str | int, ...]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InputInvalid(path, "must be a text part: {type: 'text', text: …}.")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InputInvalid((*path, "type"), "must be 'text'.")
    if kind in _OTHER_PARTS:
        raise ParameterUnsupported(path, "this model reads text only; pictures, sound and files are not served.")
    if kind not in _TEXT_KEYS:
        raise InputInvalid((*path, "type"), "must be 'text'.")
    text = part.get(_TEXT_KEYS[kind])
    if not isinstance(text, str):
        raise InputInvalid((*path, _TEXT_KEYS[kind]), "must be a string.")
    return text


def _tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    """Earlier calls in OpenAI's form, whichever form they came in, with arguments as the object that they are.

    Arguments that are no JSON object stay the text they are: a model once wrote them, and may read them again.
    """
    path = ("messages", index, "tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InputInvalid(path, "must be a list of objects.")
    if len(calls) > _TOOL_CALLS_MAX:
        raise InputInvalid(path, f"must hold at most {_TOOL_CALLS_MAX} calls.")
    return [_tool_call(call, (*path, at)) for at, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    said = call.get("function", call)
    name = said.get("name") if isinstance(said, dict) else None
    if not isinstance(name, str) or not name:
        raise InputInvalid(path, "must name a function: {id, type: 'function', function: {name, arguments}}.")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise InputInvalid((*path, "id"), "must be a string.")
    told: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _arguments(said, path)}}
    return told if call_id is None else {"id": as_the_model_wrote(call_id), **told}


def _arguments(said: dict[str, Any], path: tuple[str | int, ...]) -> dict[str, Any] | str:
    arguments = said.get("arguments")
    if arguments is None:
        return {}
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise InputInvalid((*path, "arguments"), "must be an object or its JSON text.")
    try:
        read = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return read if isinstance(read, dict) else arguments
