"""What Workers AI's dialect reads: the bodies of /ai/run, and the queries of its listings. Pure shapes."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from api.body_shapes import MESSAGES, NOT_SERVED, nullable
from api.console.schemas import Instant
from api.sampling import GenerationOptions
from billing.summaries import GroupBy


class RunBody(GenerationOptions):
    """Exactly one of prompt and messages. Wider than OpenAI's where the native schema is: temperature reaches 5."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[dict[str, Any]] | None, WithJsonSchema(nullable(MESSAGES))] = None
    raw: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Refused by name: pictures, and the batch form.
    image: Annotated[Any, WithJsonSchema(NOT_SERVED)] = None
    requests: Annotated[Any, WithJsonSchema(NOT_SERVED)] = None


class NamedRunBody(BaseModel):
    """A run whose model is named in the body. options: of the run itself, beside what the model reads.

    A field that stands beside `input` instead of in it is read as if it stood there, so that none is dropped unsaid.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[dict[str, Any], WithJsonSchema(RunBody.model_json_schema(mode="validation"))]
    options: dict[str, Any] | None = None


def _flag(value: object) -> object:
    """A flag in a query is written as JSON writes it."""
    if value in ("true", "false"):
        return value == "true"
    raise ValueError("must be true or false.")


Flag = Annotated[bool, BeforeValidator(_flag), WithJsonSchema({"type": "boolean"})]


class SearchQuery(BaseModel):
    """Values arrive as text, so this one is not strict."""

    search: str | None = None
    task: str | None = None
    author: str | None = None
    source: Literal["1", "2"] | None = None
    hide_experimental: Flag = False
    include_deprecated: Flag = False
    format: Literal["openrouter"] | None = None
    page: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    per_page: Annotated[int, Field(ge=1, le=1_000)] = 50


class SchemaQuery(BaseModel):
    model: Annotated[str, Field(min_length=1)]


def _groups(value: object) -> object:
    """`model`, `day`, or both with a comma between."""
    if not isinstance(value, str):
        return value
    names = value.split(",")
    if len(set(names)) < len(names) or not set(names) <= {GroupBy.MODEL, GroupBy.DAY}:
        raise ValueError("must be model, day, or both with a comma between.")
    return tuple(GroupBy(name) for name in names)


_GROUPS = {"enum": ["model", "day", "model,day", "day,model"]}


class UsageQuery(BaseModel):
    """The period is half open."""

    from_ns: Instant | None = Field(default=None, alias="from")
    to_ns: Instant | None = Field(default=None, alias="to")
    group_by: Annotated[tuple[GroupBy, ...], BeforeValidator(_groups), WithJsonSchema(_GROUPS)] = ()
