"""Reads a request's body once and turns its bytes into a schema, with every way to fail said as a typed error.

Called by the generating routes. The size limit and the reading deadline are the middleware's; shape limits are here.
"""

import re
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from api.departure import ClientGone
from api.errors import BodyNotJson, InputInvalid

DEPTH_MAX: Final = 64
# Values other than numbers: each costs an object of tens of bytes, so that a small body can't become a large heap.
# Numbers are left out, because a prompt may be a long list of token ids.
VALUES_MAX: Final = 10_000

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# How pydantic names what is allowed where that is members of an enum.
_MEMBER: Final = re.compile(r"<\w+\.\w+: ('[^']*')>")
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))

Schema = TypeVar("Schema", bound=BaseModel)


async def read_body(request: Request) -> bytes:
    """The whole body. Raises what the bounded `receive` of the middleware raises, or ClientGone."""
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def parse(schema: type[Schema], body: bytes, *, values_max: int = VALUES_MAX) -> Schema:
    """Strictly: NaN, Infinity and numbers beyond a double are no JSON; a bool is no number; a string is no number.

    orjson and then pydantic costs what pydantic's own JSON parser costs, and that one lets NaN into ignored fields.
    """
    check_shape(body, values_max=values_max)
    try:
        values: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        reason = "is empty" if not body else f"is not valid JSON: {error.msg} at byte {error.pos}"
        raise BodyNotJson(f"The request body {reason}.") from None
    if not isinstance(values, dict):
        raise BodyNotJson("The request body must be a JSON object.")
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise input_invalid(error) from None


def check_shape(body: bytes, *, values_max: int = VALUES_MAX) -> None:
    """Refuse bodies that would be deep or many-valued, before anything is built from them.

    A body with few brackets and strings can't be either, and that is told by counting bytes.
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= DEPTH_MAX and opened + body.count(b'"') // 2 <= values_max:
        return
    bare = _STRING.sub(b'""', body)
    opened = bare.count(b"[") + bare.count(b"{")
    values = opened + bare.count(b'""') - bare.count(b":")
    if values > values_max:
        raise BodyNotJson(f"The request body holds more than {values_max} JSON values.")
    if opened > DEPTH_MAX and _depth(bare.translate(None, _NOT_BRACKETS)) > DEPTH_MAX:
        raise BodyNotJson(f"The request body is nested deeper than {DEPTH_MAX} levels.")


def _depth(brackets: bytes) -> int:
    depth = deepest = 0
    for bracket in brackets:
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def input_invalid(error: ValidationError) -> InputInvalid:
    """The first thing pydantic found, as one sentence with its path; never with the value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    reason = _MEMBER.sub(r"\1", first["msg"].removeprefix("Value error, "))
    return InputInvalid(first["loc"], reason if reason.endswith(".") else reason + ".")
