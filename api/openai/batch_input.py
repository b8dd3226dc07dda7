"""Reads the lines of a batch's file: {custom_id, method, url, body}. Pure; errors are said in OpenAI's codes.

What the body itself asks is checked when the line runs, and an error there is the line's own.
"""

from typing import Any, Final

import orjson

from api.body import check_shape
from api.errors import BodyNotJson
from gateway.batches.batch import NewLine

CUSTOM_ID_CHARACTERS_MAX: Final = 512
# As the body of a request has by default: a line is one.
LINE_BYTES_MAX: Final = 8 << 20
# More would tell nobody more; later lines are then not looked at.
_ERRORS_MAX: Final = 50


class BatchInput:
    """endpoint: the one that every line must name."""

    def __init__(self, endpoint: str, lines_max: int) -> None:
        self._endpoint = endpoint
        self._lines_max = lines_max
        self._custom_ids: set[str] = set()
        self._model = ""
        self._lines = 0
        self.errors: list[dict[str, Any]] = []

    def see(self, number: int, text: bytes) -> NewLine | None:
        self._lines += 1
        if self._lines > self._lines_max or len(self.errors) >= _ERRORS_MAX:
            return None
        found = self._checked(number, text)
        if isinstance(found, NewLine):
            return found
        self.errors.append(found)
        return None

    def end(self) -> str:
        if self._lines > self._lines_max:
            self.errors.append(_error("too_many_requests", None, f"A batch has at most {self._lines_max} requests."))
        if not self._lines:
            self.errors.append(_error("empty_file", None, "The file has no requests."))
        return self._model

    def _checked(self, number: int, text: bytes) -> NewLine | dict[str, Any]:
        fields = read_object(text)
        if isinstance(fields, str):
            return _error("invalid_json_line", number, fields)
        custom_id, body = fields.get("custom_id"), fields.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= CUSTOM_ID_CHARACTERS_MAX:
            reason = f"Each line has a custom_id, a text of 1 to {CUSTOM_ID_CHARACTERS_MAX} characters."
            return _error("missing_required_parameter", number, reason, "custom_id")
        if "\0" in custom_id:
            return _error("invalid_custom_id", number, "A custom_id has no NUL characters.", "custom_id")
        if custom_id in self._custom_ids:
            return _error("duplicate_custom_id", number, "Each line has a custom_id of its own.", "custom_id")
        if fields.get("method") != "POST":
            return _error("invalid_method", number, "The method of each line is POST.", "method")
        if fields.get("url") != self._endpoint:
            return _error("invalid_url", number, f"The url of each line is {self._endpoint}, the batch's.", "url")
        if not isinstance(body, dict) or not isinstance(body.get("model"), str):
            reason = "Each line has a body, an object that names a model."
            return _error("missing_required_parameter", number, reason, "body.model")
        if body["model"] != (self._model or body["model"]):
            return _error("mismatched_model", number, "All lines of a file name the same model.", "body.model")
        self._custom_ids.add(custom_id)
        self._model = body["model"]
        return NewLine(number, custom_id, orjson.dumps(body))


def read_object(text: bytes) -> dict[str, Any] | str:
    """The object on a line, or what is wrong with it."""
    if len(text) > LINE_BYTES_MAX:
        return f"A line has at most {LINE_BYTES_MAX} bytes."
    try:
        check_shape(text)
        fields = orjson.loads(text)
    except BodyNotJson as error:
        return error.message.replace("request body", "line")
    except orjson.JSONDecodeError as error:
        return f"This line is not valid JSON: {error.msg}."
    return fields if isinstance(fields, dict) else "This line is not a JSON object."


def _error(code: str, number: int | None, message: str, param: str | None = None) -> dict[str, Any]:
    line = None if number is None else number + 1  # as editors count
    return {"code": code, "line": line, "message": message, "param": param}
