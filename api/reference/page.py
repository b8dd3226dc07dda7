"""GET /docs: the OpenAPI document as a page. Rendered here, once a process; nothing on it runs or loads anything."""

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from api.page_templates import templates_of

_TAGS: Final = ("Inference", "Batches", "Models", "Usage", "Keys", "Console", "Operation")


class ReferencePage:
    """document: gives the OpenAPI document."""

    def __init__(self, document: Callable[[], Mapping[str, Any]]) -> None:
        self._document = document
        self._answer: tuple[bytes, dict[str, str]] | None = None

    async def page(self, _request: Request) -> Response:
        """Show the reference as a page."""
        if self._answer is None:
            self._answer = _rendered(self._document())
        body, headers = self._answer
        return Response(body, headers=headers, media_type="text/html")


def _rendered(document: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    environment = templates_of("api.reference")
    environment.filters.update(
        words=_words, pretty=_pretty, fields=_fields, parameter=lambda one: _found(document, one)
    )
    style = environment.get_template("reference.css").render()
    text = environment.get_template("reference.html.j2").render(
        # A style that is written here needs no escaping, and a browser must read the very bytes that were hashed.
        style=Markup(style),  # noqa: S704  our own file
        info=document["info"],
        groups=_groups(document),
        schemas=document["components"]["schemas"],
    )
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), {"content-security-policy": policy, "x-content-type-options": "nosniff"}


def _groups(document: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str, Mapping[str, Any]]]]]:
    """Operations by tag, in the order in which a reader needs them."""
    groups: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {tag: [] for tag in _TAGS}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = operation.get("tags", ["Other"])[0]
            groups.setdefault(tag, []).append((method.upper(), path, operation))
    return [(tag, listed) for tag, listed in groups.items() if listed]


def _found(document: Mapping[str, Any], parameter: Mapping[str, Any]) -> Mapping[str, Any]:
    named = parameter.get("$ref")
    found: Mapping[str, Any] = document["components"]["parameters"][named.rsplit("/", 1)[1]] if named else parameter
    return found


def _fields(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    required = schema.get("required", ())
    return [(name, shape, name in required) for name, shape in schema.get("properties", {}).items()]


def _words(shape: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in shape:
        return str(shape["$ref"]).rsplit("/", 1)[1]
    if "enum" in shape or "const" in shape:
        return " | ".join(str(orjson.dumps(value), "utf-8") for value in shape.get("enum", [shape.get("const")]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in shape:
            return (" and " if key == "allOf" else " | ").join(dict.fromkeys(_words(one) for one in shape[key]))
    kind = shape.get("type")
    if isinstance(kind, list):
        return " | ".join(kind)
    if kind == "array":
        return f"list of {_words(shape.get('items', {}))}"
    bounds = [f"{sign} {shape[key]}" for key, sign in _BOUNDS.items() if key in shape]
    return " ".join([str(kind or "any"), *bounds])


_BOUNDS: Final = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def _pretty(value: object) -> str:
    return str(orjson.dumps(value, option=orjson.OPT_INDENT_2), "utf-8")
