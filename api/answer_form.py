"""The form that an answer must have, as clients ask for it → the engine's fields: tools and the choice among them, JSON
schemas bare or wrapped, regular expressions and grammars. Both dialects use it.

Called by intake.py for requests that ask for any of it. A form that can't be compiled is refused here, before anything
is held, with the library that the local engine compiles it with. What was found good is remembered: agents send the
same tools with every request.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import orjson

from api.errors import InputInvalid, ParameterUnsupported
from api.sampling import GenerationOptions
from backends import grammar

TOOLS_MAX: Final = 128
TOOLS_BYTES_MAX: Final = 128 << 10
DESCRIPTION_CHARS_MAX: Final = 8192
# Of forms that were compiled; an entry is at most the bounds above.
_REMEMBERED: Final = 64

_FUNCTION_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)
# A bare schema says something about values at its top; a wrapper says it under `schema`.
_SCHEMA_WORDS: Final = frozenset(
    {"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "items", "$defs", "required"}
)


Path = tuple[str | int, ...]


def form_fields(options: GenerationOptions, *, chat: bool) -> dict[str, Any]:
    """SGLang's fields for what the options ask, checked. Raises InputInvalid with the path to what is wrong.

    chat: only a chat can call tools.
    """
    fields = _tool_fields(options)
    if fields and not chat:
        raise InputInvalid(("tools",), "needs messages: a prompt without a chat template can't call tools.")
    form = _response_format(options)
    if form is not None:
        fields["response_format"] = form
    for name in ("regex", "ebnf"):
        text = getattr(options, name)
        if text is not None:
            fields[name] = text
    if fields:
        _check(fields, options)
    return fields


def _check(fields: Mapping[str, Any], options: GenerationOptions) -> None:
    schema = fields.get("response_format", {}).get("json_schema", {}).get("schema")
    if schema is not None and (fault := _schema_fault(orjson.dumps(schema), lenient=False)) is not None:
        raise InputInvalid((*_schema_path(options), *fault[0]), fault[1])
    for tool in fields.get("tools") or ():
        function = tool["function"]
        parameters = function.get("parameters")
        if parameters is None:
            continue
        fault = _schema_fault(orjson.dumps(parameters), lenient=not function.get("strict"))
        if fault is not None:
            raise InputInvalid((*_function_path(options, function["name"]), "parameters", *fault[0]), fault[1])
    reason = _form_fault(orjson.dumps(fields))
    if reason is not None:
        raise InputInvalid(_blamed(fields), reason)


@lru_cache(_REMEMBERED)
def _schema_fault(schema: bytes, *, lenient: bool) -> tuple[Path, str] | None:
    try:
        grammar.check_schema(orjson.loads(schema), lenient=lenient)
    except grammar.GrammarInvalid as error:
        return error.path, error.reason
    return None


@lru_cache(_REMEMBERED)
def _form_fault(fields: bytes) -> str | None:
    try:
        text = grammar.of_fields(orjson.loads(fields))
        if text is not None:
            grammar.check(text)
    except grammar.GrammarInvalid as error:
        return error.reason
    return None


def _blamed(fields: Mapping[str, Any]) -> Path:
    """Schemas were good each by itself, so the fault is of what stands last here, or of them together."""
    return (next(name for name in ("regex", "ebnf", "response_format", "tools") if name in fields),)


def _tool_fields(options: GenerationOptions) -> dict[str, Any]:
    tools = _tools(options.tools)
    choice = options.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InputInvalid(("tool_choice",), "needs tools to choose from.")
        return {}
    if choice == "none":
        return {}  # the model is not even told of them: it can't call what it does not know
    chosen, tools = _choice(choice, tools)
    fields: dict[str, Any] = {"tools": tools, "tool_choice": chosen}
    if options.parallel_tool_calls is False:
        fields["parallel_tool_calls"] = False
    return fields


def _tools(listed: Any) -> list[dict[str, Any]]:
    """In OpenAI's nested form, whichever form they came in."""
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise InputInvalid(("tools",), "must be a list of tools.")
    if len(listed) > TOOLS_MAX:
        raise InputInvalid(("tools",), f"must hold at most {TOOLS_MAX} tools.")
    tools = [_tool(tool, at) for at, tool in enumerate(listed)]
    names = [tool["function"]["name"] for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InputInvalid(("tools", at), "has the name of an earlier tool.")
    if len(orjson.dumps(tools)) > TOOLS_BYTES_MAX:
        raise InputInvalid(("tools",), f"are larger than {TOOLS_BYTES_MAX} bytes together.")
    return tools


def _tool(tool: Any, at: int) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise InputInvalid(("tools", at), "must be an object.")
    kind = tool.get("type", "function")
    if kind != "function":
        raise ParameterUnsupported(("tools", at, "type"), "only functions are served.")
    path: Path = ("tools", at)
    said = tool
    if "function" in tool:
        path, said = (*path, "function"), tool["function"]
        if not isinstance(said, dict):
            raise InputInvalid(path, "must be an object.")
    name = said.get("name")
    if not isinstance(name, str) or _FUNCTION_NAME.fullmatch(name) is None:
        raise InputInvalid((*path, "name"), "must be 1 to 128 letters, digits, or any of _ . : / -.")
    function: dict[str, Any] = {"name": name}
    description = said.get("description")
    if description is not None:
        if not isinstance(description, str) or len(description) > DESCRIPTION_CHARS_MAX:
            raise InputInvalid((*path, "description"), f"must be a text of at most {DESCRIPTION_CHARS_MAX} characters.")
        function["description"] = description
    for key, wanted in (("parameters", dict), ("strict", bool)):
        value = said.get(key)
        if value is None:
            continue
        if not isinstance(value, wanted):
            raise InputInvalid((*path, key), "must be an object." if wanted is dict else "must be a boolean.")
        function[key] = value
    return {"type": "function", "function": function}


def _choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[str | dict[str, Any], list[dict[str, Any]]]:
    """SGLang's `tool_choice`, and the tools that are left to choose from."""
    if choice is None or choice in ("auto", "required"):
        return choice or "auto", tools
    if choice == "any":  # other vendors' word
        return "required", tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        said = choice.get("allowed_tools") or choice
        mode, listed = said.get("mode", "auto"), said.get("tools")
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise InputInvalid(("tool_choice",), "allowed_tools needs a mode, auto or required, and tools.")
        names = [_chosen_name(one, ("tool_choice", "tools", at)) for at, one in enumerate(listed)]
        return mode, [_named(tools, name) for name in dict.fromkeys(names)]
    if kind in ("function", "tool"):
        name = _chosen_name(choice, ("tool_choice",))
        _named(tools, name)
        return {"type": "function", "function": {"name": name}}, tools
    raise InputInvalid(
        ("tool_choice",), "must be none, auto, required, any, or an object that names a function: {type, function}."
    )


def _chosen_name(choice: Any, path: Path) -> str:
    said = choice.get("function", choice) if isinstance(choice, dict) else None
    name = said.get("name") if isinstance(said, dict) else None
    if not isinstance(name, str):
        raise InputInvalid(path, "must name a function.")
    return name


def _named(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise InputInvalid(("tool_choice",), "names a function that is not among the tools.")


def _response_format(options: GenerationOptions) -> dict[str, Any] | None:
    """SGLang's `response_format`, None for plain text."""
    path, form = options.answer_format
    if options.guided_json is not None:
        if form is not None:
            raise InputInvalid(("guided_json",), "differs from response_format; give one of them.")
        if not isinstance(options.guided_json, dict):
            raise InputInvalid(("guided_json",), "must be a JSON Schema.")
        return _wrapped(options.guided_json, "guided", None)
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InputInvalid(path, "must be an object.")
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            return _json_schema(form, path)
        case _:
            raise InputInvalid((*path, "type"), "must be text, json_object or json_schema.")


def _json_schema(form: dict[str, Any], path: Path) -> dict[str, Any]:
    """Three ways to write one: OpenAI's wrapper, Workers AI's bare schema, and Responses' flat format."""
    said = form.get("json_schema", form if "schema" in form else None)
    if not isinstance(said, dict):
        raise InputInvalid((*path, "json_schema"), "must be an object: a JSON Schema, or {name, schema}.")
    if not _is_wrapper(said):
        return _wrapped(said, "answer", None)
    schema = said["schema"]
    if not isinstance(schema, dict):
        raise InputInvalid((*path, *(("json_schema",) if said is not form else ()), "schema"), "must be a JSON Schema.")
    return _wrapped(schema, said.get("name"), said.get("strict"))


def _is_wrapper(said: Mapping[str, Any]) -> bool:
    bare = _SCHEMA_WORDS - {"type"} if said.get("type") == "json_schema" else _SCHEMA_WORDS
    return "schema" in said and not said.keys() & bare


def _wrapped(schema: dict[str, Any], name: Any, strict: Any) -> dict[str, Any]:
    named = name if isinstance(name, str) and name else "answer"
    return {
        "type": "json_schema",
        "json_schema": {"name": named, "schema": schema, **({"strict": strict} if isinstance(strict, bool) else {})},
    }


def _schema_path(options: GenerationOptions) -> Path:
    """Where the schema stands in the body."""
    path, form = options.answer_format
    if form is None:
        return ("guided_json",)
    said = form.get("json_schema", form)
    inner = ("json_schema",) if said is not form else ()
    return (*path, *inner, *(("schema",) if _is_wrapper(said) else ()))


def _function_path(options: GenerationOptions, name: str) -> Path:
    """Where the fields of the tool of this name stand in the body."""
    for at, tool in enumerate(options.tools):
        if tool.get("function", tool).get("name") == name:
            return ("tools", at, "function") if "function" in tool else ("tools", at)
    raise AssertionError("a tool that was read is in the body")
