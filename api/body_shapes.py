"""JSON Schemas of what bodies hold and code reads by hand: messages, tools, the choice among them, the answer's format.

They stand in the schemas that requests are checked with, for whoever asks what may be sent: the API's document and
`models/schema`. conversation.py and answer_form.py do the checking; what is written here they enforce.
"""

from typing import Any, Final

Shape = dict[str, Any]


def nullable(shape: Shape) -> Shape:
    return {"anyOf": [shape, {"type": "null"}]}


# Known by name only to be refused with a word of why.
NOT_SERVED: Final[Shape] = {"type": "null", "description": "Not served: leave it out."}

_TEXT: Final[Shape] = {"type": "string"}
_FLAG: Final[Shape] = {"type": ["boolean", "null"]}
_OPTIONAL_TEXT: Final[Shape] = {"type": ["string", "null"]}
_TEXT_PART: Final[Shape] = {
    "anyOf": [
        _TEXT,
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "input_text"]}, "text": _TEXT},
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "refusal"}, "refusal": _TEXT},
            "required": ["type", "refusal"],
        },
    ]
}
_CALLED: Final[Shape] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "arguments": {"type": ["string", "object", "null"], "description": "JSON text, or the object itself."},
    },
    "required": ["name"],
}
_EARLIER_CALL: Final[Shape] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"id": _OPTIONAL_TEXT, "function": _CALLED},
            "required": ["function"],
        },
        {**_CALLED, "properties": {"id": _OPTIONAL_TEXT, **_CALLED["properties"]}},
    ]
}
MESSAGES: Final[Shape] = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2048,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["developer", "system", "user", "assistant", "tool", "function"]},
            "content": {"anyOf": [_TEXT, {"type": "null"}, {"type": "array", "items": _TEXT_PART}]},
            "name": _OPTIONAL_TEXT,
            "tool_call_id": _OPTIONAL_TEXT,
            "tool_calls": nullable({"type": "array", "maxItems": 128, "items": _EARLIER_CALL}),
            "function_call": nullable(_CALLED),
        },
        "required": ["role"],
        "anyOf": [
            {"required": ["content"]},
            {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
            {"required": ["function_call"], "properties": {"function_call": {"type": "object"}}},
        ],
    },
}

_FUNCTION_NAME: Final[Shape] = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
_FUNCTION: Final[Shape] = {
    "type": "object",
    "properties": {
        "name": _FUNCTION_NAME,
        "description": {"type": ["string", "null"], "maxLength": 8192},
        "parameters": {"type": ["object", "null"], "description": "JSON Schema of the arguments."},
        "strict": _FLAG,
    },
    "required": ["name"],
}
_KIND: Final[Shape] = {"type": {"const": "function"}}
TOOLS: Final[Shape] = nullable(
    {
        "type": "array",
        "maxItems": 128,
        "items": {
            "anyOf": [
                {"type": "object", "properties": {**_KIND, "function": _FUNCTION}, "required": ["function"]},
                {**_FUNCTION, "properties": {**_KIND, **_FUNCTION["properties"]}},
            ]
        },
    }
)
_NAMED: Final[Shape] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL_CHOICE: Final[Shape] = {
    "anyOf": [
        {"type": "null"},
        {"enum": ["none", "auto", "required", "any"]},
        {
            "type": "object",
            "description": "Names the one function that must be called, flat or under `function`.",
            "properties": {"type": {"enum": ["function", "tool"]}, "function": _NAMED, "name": {"type": "string"}},
            "required": ["type"],
        },
        {
            "type": "object",
            "description": "{mode, tools}, flat or under `allowed_tools`.",
            "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": {"type": "object"}},
            "required": ["type"],
        },
    ]
}
RESPONSE_FORMAT: Final[Shape] = {
    "anyOf": [
        {"type": "null"},
        {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
        {
            "type": "object",
            "description": "A JSON Schema, bare or as {name, schema, strict}.",
            "properties": {"type": {"const": "json_schema"}, "json_schema": {"type": "object"}},
            "required": ["type", "json_schema"],
        },
        {
            "type": "object",
            "description": "The same without a layer between.",
            "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}, "name": {}, "strict": {}},
            "required": ["type", "schema"],
        },
    ]
}
GUIDED_JSON: Final[Shape] = {"type": ["object", "null"], "description": "JSON Schema that the answer satisfies."}


def flagged(name: str) -> Shape:
    """An object of which one boolean is read."""
    return nullable({"type": "object", "properties": {name: _FLAG}})


_TOKEN_ID: Final[Shape] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TOKEN_IDS: Final[Shape] = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
SOME_TEXT: Final[Shape] = {"type": "string", "minLength": 1}
# One prompt: as text or token ids, alone or in a list of one.
PROMPT: Final[Shape] = {
    "anyOf": [
        SOME_TEXT,
        TOKEN_IDS,
        {"type": "array", "items": {"anyOf": [SOME_TEXT, TOKEN_IDS]}, "minItems": 1, "maxItems": 1},
    ]
}
