"""The generation parameters that both dialects take: their ranges, and their names at the engine.

Schemas of the dialects extend GenerationOptions. Nothing reaches an engine that is not listed in `engine_fields`.
"""

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from api.body_shapes import (
    GUIDED_JSON,
    NOT_SERVED,
    RESPONSE_FORMAT,
    TOOL_CHOICE,
    TOOLS,
    flagged,
    nullable,
)
from api.charged_body import ChargedBody
from api.errors import InputInvalid, ParameterUnsupported
from billing.price_book import Tier

STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 256
LOGIT_BIAS_MAX: Final = 300
_TOKEN_ID: Final = re.compile(r"\d{1,9}", re.ASCII)
# 0 would leave no token at all; this leaves the likeliest one, which is what callers of 0 mean.
_TOP_P_LEAST: Final = 1e-6

FALLBACKS_MAX: Final = 5


def _stop(value: object) -> tuple[str, ...] | None:
    stops = [value] if isinstance(value, str) else value
    if stops is None or stops == []:
        return None
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings.")
    if len(stops) > STOPS_MAX:
        raise ValueError(f"must hold at most {STOPS_MAX} strings.")
    if not all(1 <= len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise ValueError(f"each string must have 1 to {STOP_CHARS_MAX} characters.")
    return tuple(stops)


def _logit_bias(value: object) -> dict[str, float] | None:
    if value is None or value == {}:
        return None
    if not isinstance(value, dict) or len(value) > LOGIT_BIAS_MAX:
        raise ValueError(f"must be an object of at most {LOGIT_BIAS_MAX} token ids.")
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise ValueError("keys must be token ids, written as integers.")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("values must be numbers from -100 to 100.")
    return value


def _flag(value: object, name: str) -> bool | None:
    """One boolean of an object whose other keys have no effect here."""
    if value is None:
        return None
    flag = value.get(name) if isinstance(value, dict) else value
    if isinstance(value, dict) and (flag is None or isinstance(flag, bool)):
        return flag
    raise ValueError(f"must be an object whose {name} is a boolean.")


def _rejects_if_busy(value: object) -> bool:
    return _flag(value, "rejectIfBusy") is True


def _include_usage(value: object) -> bool | None:
    return _flag(value, "include_usage")


_STOP_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX}
_STOP_SCHEMA: Final = {
    "anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": STOPS_MAX}, {"type": "null"}]
}
_LOGIT_BIAS_SCHEMA: Final = nullable(
    {
        "type": "object",
        "maxProperties": LOGIT_BIAS_MAX,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
)


class GenerationOptions(ChargedBody):
    """What both dialects' bodies ask of a generation."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    stop: Annotated[tuple[str, ...] | None, BeforeValidator(_stop), WithJsonSchema(_STOP_SCHEMA)] = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_logit_bias), WithJsonSchema(_LOGIT_BIAS_SCHEMA)] = (
        None
    )
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    # What the client said about usage on streams: True, False, or None for nothing. Without `stream` it says nothing.
    include_usage: Annotated[
        bool | None,
        BeforeValidator(_include_usage),
        WithJsonSchema(flagged("include_usage")),
    ] = Field(default=None, alias="stream_options")
    reject_if_busy: Annotated[
        bool,
        BeforeValidator(_rejects_if_busy),
        WithJsonSchema(flagged("rejectIfBusy")),
    ] = Field(default=False, alias="options")
    service_tier: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    # To fall back to, in their order, where the model asked for has no room or its engine fails.
    models: (
        Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=FALLBACKS_MAX, strict=False)] | None
    ) = None
    # The answer's form; answer_form.py reads and checks it.
    tools: Annotated[Any, WithJsonSchema(TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[Any, WithJsonSchema(RESPONSE_FORMAT)] = None
    guided_json: Annotated[Any, WithJsonSchema(GUIDED_JSON)] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    ebnf: Annotated[str, Field(min_length=1)] | None = None
    # Refused by the dialects.
    lora: Annotated[Any, WithJsonSchema(NOT_SERVED)] = None
    lora_path: Annotated[Any, WithJsonSchema(NOT_SERVED)] = None
    # Refused by `refuse_other_forms`: an answer that ignored them would be another one than was asked for.
    functions: Annotated[Any, WithJsonSchema(nullable({"type": "array", "maxItems": 0}))] = None
    function_call: Annotated[Any, WithJsonSchema({"enum": ["none", "auto", None]})] = None
    modalities: Annotated[Any, WithJsonSchema(nullable({"type": "array", "items": {"const": "text"}}))] = None

    @property
    def streamed(self) -> bool:
        return self.stream is True

    @property
    def output_tokens(self) -> int | None:
        """What the client asked for under either name. Raises InputInvalid if it asked for two things."""
        under_the_older_name, tokens = self.max_tokens, self.max_completion_tokens
        if under_the_older_name and tokens and under_the_older_name != tokens:
            raise InputInvalid(("max_tokens",), "differs from max_completion_tokens; give one of them.")
        return tokens or under_the_older_name

    def choices(self, choices_max: int) -> int:
        choices = self.n
        if choices is not None and choices > choices_max:
            raise InputInvalid(("n",), f"must be at most {choices_max} here.")
        return choices or 1

    @property
    def tier(self) -> Tier | None:
        """None if nothing was asked. Of OpenAI's names only "priority" is another way of being served here."""
        if self.service_tier is None:
            return None
        return Tier.PRIORITY if self.service_tier == Tier.PRIORITY else Tier.STANDARD

    @property
    def answer_format(self) -> tuple[tuple[str, ...], Any]:
        """What was asked for as `response_format`, and where it stands."""
        return ("response_format",), self.response_format

    @property
    def has_form(self) -> bool:
        """Whether anything is asked of the answer's form: most requests ask nothing, and pay nothing for it."""
        return not self.model_fields_set.isdisjoint(_FORM_NAMES) and (
            self.tools is not None
            or self.tool_choice is not None
            or self.answer_format[1] is not None
            or self.guided_json is not None
            or self.regex is not None
            or self.ebnf is not None
        )

    @property
    def asks_for_lora(self) -> bool:
        given = self.model_fields_set
        return ("lora" in given and self.lora is not None) or ("lora_path" in given and self.lora_path is not None)

    def refuse_other_forms(self) -> None:
        """Raises ParameterUnsupported for OpenAI's older tools, and for sound."""
        if self.model_fields_set.isdisjoint(_OTHER_FORMS):
            return
        if self.functions not in (None, []):
            raise ParameterUnsupported(("functions",), "this older form is not served; send tools and tool_choice.")
        if self.function_call not in (None, "none", "auto"):
            raise ParameterUnsupported(("function_call",), "this older form is not served; send tool_choice.")
        asked = self.modalities
        if asked is not None and not (isinstance(asked, list) and all(one == "text" for one in asked)):
            raise ParameterUnsupported(("modalities",), "answers are text only.")

    def engine_fields(self) -> dict[str, Any]:
        """Set fields under SGLang's names; the caller's own defaults are the engine's."""
        values = vars(self)
        fields = {name: values[name] for name in _ENGINE_NAMES if values[name] is not None}
        if fields.get("top_k") == 0:
            fields["top_k"] = -1  # both mean "off"; engines know the second
        if "top_p" in fields:
            fields["top_p"] = max(fields["top_p"], _TOP_P_LEAST)
        return fields


# `text`: where the Responses dialect has its format.
_FORM_NAMES: Final = frozenset({"tools", "tool_choice", "response_format", "text", "guided_json", "regex", "ebnf"})
_OTHER_FORMS: Final = frozenset({"functions", "function_call", "modalities"})
_ENGINE_NAMES: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "logit_bias",
)  # fmt: skip
