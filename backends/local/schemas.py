"""The request bodies that surface.py accepts, in SGLang's words. Unknown fields are ignored, as SGLang does.

Absent and null mean the same. Ranges are SGLang's, so that both engines refuse the same requests.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.local.sequence import SamplingParams

STOPS_MAX = 32
STOP_CHARACTERS_MAX = 256
"""Each produced token is compared with every beginning of every stop string; this keeps that under a millisecond."""
BIASES_MAX = 1024
TOOLS_MAX = 128

TokenId = Annotated[int, Field(ge=0)]
Salt = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(max_length=STOP_CHARACTERS_MAX)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    model: str | None = None
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    """Both separate prefix caches: only requests with the same pair share one."""
    bootstrap_host: Annotated[str, Field(max_length=256)] | None = None
    bootstrap_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    bootstrap_room: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    """The three of them: where the halves of a pair meet (pair/__init__.py)."""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    n: Literal[1] | None = None
    """One answer a request: several are several requests, each with an id and an end of its own."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOPS_MAX)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=BIASES_MAX)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # The answer's form; backends/grammar.py gives them meaning.
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def cache_scope(self) -> str:
        # NUL keeps ("ab", "c") from being ("a", "bc").
        return f"{self.cache_salt or ''}\0{self.extra_key or ''}"

    @property
    def stops(self) -> tuple[str, ...]:
        listed = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in listed if stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def form_fields(self) -> dict[str, Any]:
        """What limits the answer's form, by SGLang's names; empty for most requests."""
        fields = {"response_format": self.response_format, "regex": self.regex, "ebnf": self.ebnf}
        return {name: value for name, value in fields.items() if value is not None}

    def sampling(self, usual: Mapping[str, float]) -> SamplingParams:
        """What was asked for; `usual` (the checkpoint's own recommendation, by SGLang's names) fills the gaps."""
        return SamplingParams(
            temperature=_or(self.temperature, usual.get("temperature", 1.0)),
            top_p=_or(self.top_p, usual.get("top_p", 1.0)),
            top_k=int(_or(self.top_k, usual.get("top_k", -1))) or -1,
            min_p=_or(self.min_p, usual.get("min_p", 0.0)),
            seed=self.seed,
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, usual.get("repetition_penalty", 1.0)),
            logit_bias=tuple((self.logit_bias or {}).items()),
            top_logprobs=self.wanted_logprobs,
        )


class FunctionSpec(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    function: FunctionSpec


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(GenerationBody):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    """A prompt that is tokens already: the chat template is not applied."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolSpec], Field(max_length=TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _has_a_prompt(self) -> Self:
        if self.messages is None and self.input_ids is None:
            raise ValueError("either messages or input_ids is needed")
        for message in self.messages or ():
            if not isinstance(message.get("role"), str):
                raise ValueError("each message needs a role")  # noqa: TRY004  pydantic turns it into its own error
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def calls_tools(self) -> bool:
        """The answer may hold tool calls, and is read for them."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def form_fields(self) -> dict[str, Any]:
        if not self.calls_tools:
            return super().form_fields
        fields = self.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"}, exclude_none=True)
        return super().form_fields | fields

    @property
    def shown_tools(self) -> tuple[list[dict[str, Any]], str | dict[str, Any]]:
        """What a chat template shows of tools, and the choice among them."""
        if not self.calls_tools:
            return [], "auto"
        fields = self.model_dump(include={"tools", "tool_choice"}, exclude_none=True)
        return fields["tools"], fields.get("tool_choice", "auto")

    def plain_messages(self) -> list[dict[str, Any]]:
        """With content as one text: templates of text models can't join parts themselves."""
        return [message | {"content": _text(message.get("content"))} for message in self.messages or ()]


class CompletionBody(GenerationBody):
    prompt: str | Annotated[list[TokenId], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class AbortBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.rid and not self.abort_all:
            raise ValueError("either rid or abort_all is needed")
        return self


class MemoryBody(BaseModel):
    """What to release or resume. SGLang can keep one of the two; here weights and pages go together."""

    model_config = ConfigDict(extra="ignore")

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @model_validator(mode="after")
    def _names_both(self) -> Self:
        if self.tags and not {"weights", "kv_cache"} <= set(self.tags):
            raise ValueError("tags: weights and kv_cache are released and resumed together")
        return self


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    raise ValueError("content must be text or a list of text parts")


def _part_text(part: object) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError("only text parts are understood")
