"""Makes the ids of tool calls unique in a conversation, and takes what was added off again when they come back. And
leaves out the ids and names that engines send as null.

Some models' parsers number calls anew in every answer (`functions.get_weather:0`), so that a conversation of two turns
has two calls of one id. Their chat templates want that very form in the history, hence a suffix instead of a new id.
"""

import re
from typing import Any, Final

_NUMBERED: Final = re.compile(r"functions\.[A-Za-z0-9_.:/-]+:\d+")
# A quote inside a JSON string is always escaped, so this can only be a key and its value.
_NUMBERED_BYTES: Final = re.compile(rb'"id":"(functions\.[A-Za-z0-9_.:/-]+:\d+)"')
_SUFFIXED: Final = re.compile(r"(functions\.[A-Za-z0-9_.:/-]+:\d+)~[0-9a-f-]+")
_SUFFIX_CHARS: Final = 12


def suffix_of(rid: str) -> str:
    """The random end of one engine call's id."""
    return rid[-_SUFFIX_CHARS:].lstrip("-")


def unique_in_chunk(payload: bytes, suffix: str) -> bytes:
    """A chunk of a stream, its calls' ids made unique."""
    if b'"id":"functions.' not in payload:
        return payload
    return _NUMBERED_BYTES.sub(rb'"id":"\1~%b"' % suffix.encode(), payload)


def without_nulls(payload: bytes) -> bytes:
    """A chunk of a stream. SGLang repeats the keys of a call in each piece of its arguments, and their values are null
    from the second one on, which strict parsers refuse. A quote inside text is escaped: these are keys.
    """
    if b'"tool_calls":[' not in payload:
        return payload
    return payload.replace(b'"id":null,', b"").replace(b'"name":null,', b"")


def unique_in_message(message: dict[str, Any], suffix: str) -> None:
    """The message of a whole answer, in place."""
    for call in message.get("tool_calls") or ():
        if isinstance(call.get("id"), str) and _NUMBERED.fullmatch(call["id"]):
            call["id"] = f"{call['id']}~{suffix}"


def as_the_model_wrote(call_id: str) -> str:
    """An id as a client gives it back, without the suffix."""
    found = _SUFFIXED.fullmatch(call_id)
    return call_id if found is None else found[1]
