"""What an answer may be, as one grammar: a JSON schema, a JSON object, a regular expression, an EBNF, calls of tools.

The API process asks whether a grammar compiles, before anything is held; the local engine compiles the same grammar
into token masks. Both speak SGLang's field names (`response_format`, `regex`, `ebnf`, `tools`, `tool_choice`,
`parallel_tool_calls`). llguidance does the work; there is no torch here.

JSON is written on one line with ", " and ": ", as most models write it: free white space is where small models get
lost. For the same reason an object that lists its properties and does not say `additionalProperties` is closed, as
SGLang closes it, and an integer without bounds gets those of a double: what comes out still fits the schema. `oneOf` is
held as `anyOf`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from jsonschema import SchemaError
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from backends.tool_marks import ARGUMENTS_KEY, BETWEEN, CLOSE, NAME_KEY, OPEN

SCHEMA_BYTES_MAX: Final = 64 << 10
"""Compiling is linear in practice: this much takes some 15 ms."""
TEXT_BYTES_MAX: Final = 16 << 10
"""Of a regular expression or EBNF."""
_LOOKED_AT_MAX: Final = 100
"""Parts that are compiled alone to find the one at fault; beyond them it is the whole that is said to be wrong."""
CALLS_MAX: Final = 16
"""Calls in one answer, where several are allowed."""

# The library's own defaults, but for the size: what is refused here would cost tens of milliseconds and more.
_LIMITS: Final = LLParserLimits(max_grammar_size=200_000, initial_lexer_fuel=1_000_000, verbose_errors=False)
_ON_ONE_LINE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": False,
}
_LENIENT: Final = {**_ON_ONE_LINE, "lenient": True}
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
# Where a schema holds other schemas: as lists, and by name.
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
# Other formats say what a text is for, and leave its form open.
_FORMATS: Final = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_INTEGER_BOUNDS: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const"}
)
# Integers beyond it are not the same in every JSON reader, and a small model may write digits without end.
_INTEGER_MAX: Final = 2**53 - 1
_SINGLE: Final = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

Path = tuple[str | int, ...]


class GrammarInvalid(ValueError):
    """It can't be compiled. path: where in the schema, from its root; reason: a sentence for whoever wrote it."""

    def __init__(self, reason: str, path: Path = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path


def of_fields(fields: Mapping[str, Any]) -> str | None:
    """The grammar that SGLang's request fields ask for, None if they ask for none. Raises GrammarInvalid.

    With tools, an answer that has a form of its own is that form or calls.
    """
    answer = _answer_rule(fields)
    tools = fields.get("tools") or ()
    choice = fields.get("tool_choice") or "auto"
    if tools and choice != "none":
        parallel = fields.get("parallel_tool_calls") is not False
        return _calls(tools, choice, parallel=parallel, answer=answer)
    if answer is None:
        return None
    name, text = answer
    match name:
        case "json":
            return _of_schema(json.loads(text))
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case _:
            return str(LLMatcher.grammar_from_lark(text))


def check(grammar: str) -> None:
    """Raises GrammarInvalid if the grammar does not compile."""
    failed, texts = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    if failed:
        raise GrammarInvalid(_sentence(texts[0]))


def check_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> None:
    """Raises GrammarInvalid with the path to what can't be held.

    lenient: keywords that can't be held are let be, as in the parameters of a tool that is not strict.
    """
    if len(json.dumps(schema, ensure_ascii=False)) > SCHEMA_BYTES_MAX:
        raise GrammarInvalid(f"is larger than {SCHEMA_BYTES_MAX} bytes.")
    try:
        check(_of_schema(schema, lenient=lenient))
    except GrammarInvalid as error:
        raise _located(schema, error, lenient=lenient) from None


def limits() -> LLParserLimits:
    """What a running grammar may cost, which is what it was checked with."""
    return _LIMITS


def _answer_rule(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """The answer's own form: its kind and text."""
    wanted = fields.get("response_format") or {}
    forms: list[tuple[str, str]] = []
    match wanted.get("type"):
        case "json_object":
            forms.append(("json", '{"type": "object"}'))
        case "json_schema":
            forms.append(("json", json.dumps((wanted.get("json_schema") or {}).get("schema") or {})))
        case None | "text":
            pass
        case other:
            raise GrammarInvalid(f"response_format of type {other!r:.40} is not known.")
    for name in ("regex", "ebnf"):
        text = fields.get(name)
        if text is None:
            continue
        if len(text.encode()) > TEXT_BYTES_MAX:
            raise GrammarInvalid(f"{name} is larger than {TEXT_BYTES_MAX} bytes.")
        forms.append((name, _lark(text) if name == "ebnf" else text))
    if len(forms) > 1:
        raise GrammarInvalid("an answer has one form: give one of response_format, regex and ebnf.")
    return forms[0] if forms else None


def _lark(text: str) -> str:
    """Lark as it is; GBNF (`root ::= …`), which SGLang's `ebnf` is, turned into it."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the converter raises what it likes
        raise GrammarInvalid(f"the grammar can't be read: {_sentence(str(error))}") from None


def _of_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    options: Any = _LENIENT if lenient else _ON_ONE_LINE
    return str(LLMatcher.grammar_from_json_schema(_closed(schema), overrides=options))


def _calls(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    *,
    parallel: bool,
    answer: tuple[str, str] | None,
) -> str:
    """Calls of these tools, after free text unless one is required. In Lark, with each tool's parameters as JSON."""
    functions = [tool["function"] for tool in tools]
    if not isinstance(choice, str):
        name = choice["function"]["name"]
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise GrammarInvalid("tool_choice names a function that is not among the tools.")
        parallel = False  # a forced call is one call
    several = f"({_quoted(BETWEEN + OPEN)} call){{0,{CALLS_MAX - 1}}}" if parallel else ""
    forced = f"{_quoted(OPEN)} call {several}"
    rules = []
    if choice != "auto":
        rules.append(f"start: {forced}")
    elif answer is None:
        rules += [f"start: TEXT | free call {several}", f"free[lazy]: TEXT {_quoted(OPEN)}", "TEXT: /(.|\\n)*/"]
    elif answer[0] == "json":
        rules += [f"start: answer | {forced}", f"answer: %json {_inline(json.loads(answer[1]))}"]
    else:
        raise GrammarInvalid("regex and ebnf say the whole answer, and leave no room for tools.")
    names = " | ".join(
        f"{_quoted(function['name'] + ARGUMENTS_KEY)} arguments_{at}" for at, function in enumerate(functions)
    )
    rules.append(f"call: {_quoted(NAME_KEY)} ({names}) {_quoted('}' + CLOSE)}")
    for at, function in enumerate(functions):
        parameters = function.get("parameters") or _NO_PARAMETERS
        rules.append(f"arguments_{at}: %json {_inline(parameters, lenient=not function.get('strict'))}")
    return str(LLMatcher.grammar_from_lark("%llguidance {}\n" + "\n".join(rules)))


def _inline(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    return json.dumps({**_closed(schema), "x-guidance": _LENIENT if lenient else _ON_ONE_LINE})


def _quoted(text: str) -> str:
    return json.dumps(text)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """With integers bounded, and every object closed that lists its properties and does not say whether there are more.

    Objects are not closed where schemas are joined by allOf: each of the two would forbid what the other one needs.
    """
    joined = any("allOf" in part for part, _ in _parts(schema))
    closed: dict[str, Any] = _closing(schema, close=not joined)
    return closed


def _closing(schema: Any, *, close: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    copy = dict(schema)
    for name in _BY_NAME:
        if isinstance(copy.get(name), Mapping):
            copy[name] = {key: _closing(value, close=close) for key, value in copy[name].items()}
    for name in _LISTS:
        if isinstance(copy.get(name), list):
            copy[name] = [_closing(value, close=close) for value in copy[name]]
    if isinstance(copy.get("items"), Mapping):
        copy["items"] = _closing(copy["items"], close=close)
    if copy.get("type") == "integer" and not copy.keys() & _INTEGER_BOUNDS:
        copy |= {"minimum": -_INTEGER_MAX, "maximum": _INTEGER_MAX}
    if isinstance(copy.get("format"), str) and copy["format"] not in _FORMATS:
        del copy["format"]
    properties, required = copy.get("properties"), copy.get("required")
    if (
        close
        and isinstance(properties, Mapping)
        and properties
        and not copy.keys() & {"additionalProperties", "patternProperties", "anyOf", "oneOf", "$ref", "minProperties"}
        and isinstance(required if required is not None else [], list)
        and all(name in properties for name in required or ())
    ):
        copy["additionalProperties"] = False
    return copy


def _parts(schema: Any, path: Path = ()) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """Every schema in it, outer ones first, with its path."""
    if not isinstance(schema, Mapping):
        return
    yield schema, path
    for name in _BY_NAME:
        if isinstance(schema.get(name), Mapping):
            for key, value in schema[name].items():
                yield from _parts(value, (*path, name, key))
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            for at, value in enumerate(schema[name]):
                yield from _parts(value, (*path, name, at))
    for name in _SINGLE:
        yield from _parts(schema.get(name), (*path, name))


def _located(schema: Mapping[str, Any], error: GrammarInvalid, *, lenient: bool) -> GrammarInvalid:
    """The same error with its place: what the meta-schema finds, else the part that fails without its own parts."""
    try:
        validator_for(schema).check_schema(dict(schema))
    except SchemaError as found:
        return GrammarInvalid(f"is no JSON Schema: {_sentence(found.message)}", tuple(found.absolute_path))
    for part, path in islice(_parts(schema), _LOOKED_AT_MAX):
        reference = part.get("$ref")
        if isinstance(reference, str) and not _resolves(schema, reference):
            return GrammarInvalid("names nothing in this schema, and nothing is fetched.", (*path, "$ref"))
        try:
            check(_of_schema(_alone(part), lenient=lenient))
        except GrammarInvalid as found:
            return GrammarInvalid(found.reason, path)
    return error


def _alone(part: Mapping[str, Any]) -> dict[str, Any]:
    """The part with nothing asked of what it holds."""
    alone = {key: value for key, value in part.items() if key not in ("$ref", "$defs", "definitions", *_SINGLE[2:])}
    for name in ("properties", "patternProperties"):
        if isinstance(alone.get(name), Mapping):
            alone[name] = dict.fromkeys(alone[name], True)
    for name in _LISTS:
        if isinstance(alone.get(name), list):
            alone[name] = [True]
    for name in ("items", "additionalProperties"):
        if isinstance(alone.get(name), Mapping):
            alone[name] = True
    held_back = {name: True for name in _SINGLE[2:] if name in part}
    return {**alone, **held_back}


def _resolves(schema: Mapping[str, Any], reference: str) -> bool:
    """A reference into the schema itself."""
    if not reference.startswith("#"):
        return any(part.get("$id") == reference for part, _ in _parts(schema))
    at: Any = schema
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
            at = at[int(name)]
        elif isinstance(at, Mapping) and name in at:
            at = at[name]
        else:
            return False
    return True


def _sentence(text: str) -> str:
    """What a library's message comes to, bounded, ended as a sentence: a parser's verdict stands below its picture."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    verdicts = [line for line in lines[1:] if line.startswith("error: ")]
    line = (verdicts or lines)[0].removeprefix("error: ")[:299]
    return line if line.endswith(".") else f"{line}."
