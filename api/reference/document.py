"""The OpenAPI 3.1 document: what each route reads, answers and refuses. Pure: routes and what is told of them in.

app.py says of each route what it answers (`Told`); what it reads comes from the schemas that check it, what it refuses
from the table of errors, what it is for from its docstring. A route of which nothing is told is listed all the same.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final

from pydantic import BaseModel

from api.reference.errors import ERROR_SCHEMAS, Errors, error_responses
from api.reference.shapes import COUNT, NEURONS_TEXT, TEXT, Shape
from api.refusals import dialect_of

_PARAMETER: Final = re.compile(r"{(\w+)(?::path)?}")
_PATH_PARAMETERS: Final[dict[str, Shape]] = {
    "account_id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "model": {"type": "string", "minLength": 1, "description": "A model's id; its slashes may be percent-encoded."},
}
_DEFS: Final = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Good:
    """One way to answer well. schemas: by media type. headers: names of header components."""

    schemas: dict[str, Shape]
    status: int = 200
    description: str = "The answer."
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of a route beside its path. query: what is read of the query. open: it needs no key."""

    tag: str
    good: tuple[Good, ...]
    errors: Errors = ()
    query: type[BaseModel] | None = None
    headers: tuple[str, ...] = ()
    open: bool = False


@dataclass(frozen=True, slots=True)
class Described:
    """A route of the application."""

    method: str
    path: str
    endpoint: Callable[..., Any]
    body: type[BaseModel] | None
    body_required: bool
    media_type: str
    told: Told | None


def answer(schema: Shape, *, status: int = 200, description: str = "The answer.") -> Good:
    return Good({"application/json": schema}, status, description)


def empty(status: int = 204) -> Good:
    return Good({}, status, "Done; there is nothing to say.")


def document(routes: Iterable[Described], schemas: dict[str, Shape], *, choices_max: int) -> dict[str, Any]:
    """schemas: components that answers refer to. choices_max: this server's own bound on `n`."""
    paths: dict[str, dict[str, Any]] = {}
    components = {**schemas, **ERROR_SCHEMAS}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, components, choices_max)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagegate",
            "version": metadata.version("pagegate"),
            "description": "Serverless inference: Workers AI's REST API and OpenAI's, and the console of an account. "
            "Answers may gain fields; error codes stay.",
        },
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key of the account."}
            },
            "headers": _HEADERS,
            "parameters": _HEADER_PARAMETERS,
            "schemas": dict(sorted(components.items())),
        },
    }


def _operation(route: Described, path: str, components: dict[str, Shape], choices_max: int) -> dict[str, Any]:
    told = route.told
    doc = inspect.getdoc(route.endpoint) or ""
    summary, _, more = doc.partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": _operation_id(route.method, path),
        "summary": " ".join(summary.split()) or path,
    }
    if more:
        operation["description"] = " ".join(more.split())
    parameters: list[Any] = [
        {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS.get(name, TEXT | {"minLength": 1})}
        for name in _PARAMETER.findall(route.path)
    ]
    if told is not None:
        operation["tags"] = [told.tag]
        if told.query is not None:
            parameters += _query_parameters(told.query, components)
        parameters += [{"$ref": f"#/components/parameters/{name}"} for name in told.headers]
        if told.open:
            operation["security"] = []
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = _hoisted(_as_enforced(_schema(route.body), choices_max), components)
        operation["requestBody"] = {
            "required": route.body_required,
            "content": {route.media_type: {"schema": schema}},
        }
    operation["responses"] = _responses(told, path)
    return operation


def _responses(told: Told | None, path: str) -> dict[str, Any]:
    if told is None:
        return {"default": {"description": "The answer, or a refusal."}}
    responses: dict[str, Any] = {}
    for good in told.good:
        response: dict[str, Any] = {
            "description": good.description,
            "headers": {
                "x-request-id": {"$ref": "#/components/headers/RequestId"},
                **{name: {"$ref": f"#/components/headers/{component}"} for name, component in good.headers.items()},
            },
        }
        if good.schemas:
            response["content"] = {media: {"schema": schema} for media, schema in good.schemas.items()}
        responses[str(good.status)] = response
    for status, refused in error_responses(told.errors, dialect_of(path)).items():
        responses.setdefault(status, refused)
    return responses


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", path.replace("/client/v4/accounts/{account_id}", "/account"))
    return "_".join((method.lower(), *words))


def _schema(body: type[BaseModel]) -> Shape:
    return body.model_json_schema(mode="validation", ref_template=_DEFS)


def _hoisted(schema: Shape, components: dict[str, Shape]) -> Shape:
    """The schema without its definitions, which go to the components."""
    components.update(schema.pop("$defs", {}))
    return schema


def _as_enforced(schema: Shape, choices_max: int) -> Shape:
    """The bound on `n` of this server in place of the API's, wherever `n` stands."""
    for inner in (schema, schema.get("properties", {}).get("input", {})):
        n = inner.get("properties", {}).get("n")
        if n is not None:
            n["anyOf"][0]["maximum"] = choices_max
    return schema


def _query_parameters(query: type[BaseModel], components: dict[str, Shape]) -> list[dict[str, Any]]:
    schema = _hoisted(_schema(query), components)
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _of_text(shape)}
        for name, shape in schema.get("properties", {}).items()
    ]


def _of_text(shape: Shape) -> Shape:
    """A query can't say null: what may be null there is left out instead."""
    shape = {key: value for key, value in shape.items() if key not in {"title", "default"} or value is not None}
    choices = [one for one in shape.get("anyOf", []) if one != {"type": "null"}]
    if len(choices) == 1:
        return {**{key: value for key, value in shape.items() if key != "anyOf"}, **choices[0]}
    return {**shape, "anyOf": choices} if choices else shape


def _header(schema: Shape, description: str) -> dict[str, Any]:
    return {"description": description, "schema": schema}


_HEADERS: Final = {
    "RequestId": _header({"type": "string", "format": "uuid"}, "The request's id, also `cf-ai-req-id`."),
    "RetryAfter": _header({"type": "integer", "minimum": 1}, "Seconds after which the same request may succeed."),
    "ShouldRetry": _header({"const": "false"}, "The same request can't succeed later."),
    "Neurons": _header(NEURONS_TEXT, "What a whole answer was charged."),
    "MaxTokens": _header(COUNT, "What `max_tokens` was lowered to, where it did not fit."),
    "LimitReason": _header({"const": "credits"}, "Money that is left is what outputs were lowered to."),
    "RateLimit": _header(TEXT, "What is left of each limit, and when all of it is again."),
    "RateLimitPolicy": _header(TEXT, "The limits that apply."),
    "Deprecation": _header(TEXT, "Where the served model's end is planned: `@` and the Unix time of that UTC day."),
    "Sunset": _header(TEXT, "The same instant as a date: from it on the model is a 410."),
    "Step": _header(COUNT, "0: the model asked for served it; n: the nth of `models` did."),
    "ServedModel": _header(TEXT, "The model that served it."),
    "Attempts": _header(TEXT, "Ids of all attempts, where there were several; the last one's is the request's."),
    "IgnoredParams": _header(TEXT, "Fields of the body that had no effect."),
}


def _parameter(name: str, schema: Shape, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_HEADER_PARAMETERS: Final = {
    "IdempotencyKey": _parameter(
        "Idempotency-Key",
        {"type": "string", "pattern": "^[!-~]([ -~]{0,253}[!-~])?$"},
        "A request that is sent again with it is answered again, not run again.",
    ),
    "SessionAffinity": _parameter(
        "x-session-affinity",
        TEXT,
        "A word for requests that belong together: kept on one replica where that costs nothing.",
    ),
    "RequestTimeout": _parameter(
        "cf-aig-request-timeout",
        {"type": "integer", "minimum": 1, "maximum": 600_000},
        "Milliseconds to the first byte of an attempt's answer.",
    ),
    "MaxAttempts": _parameter(
        "cf-aig-max-attempts",
        {"type": "integer", "minimum": 1, "maximum": 5},
        "With each model, after engines' faults.",
    ),
    "RetryDelay": _parameter(
        "cf-aig-retry-delay",
        {"type": "integer", "minimum": 0, "maximum": 5_000},
        "Milliseconds before the second attempt with a model.",
    ),
    "Backoff": _parameter(
        "cf-aig-backoff", {"enum": ["constant", "linear", "exponential"]}, "What becomes of the delay."
    ),
    "Explain": _parameter("x-pagegate-explain", TEXT, "Any value: `x-pagegate-decision` says how it was admitted."),
}
