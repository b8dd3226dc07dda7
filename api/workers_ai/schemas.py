"""What Workers AI's dialect reads: the body of /ai/run, and the query of /ai/models/search. Pure shapes."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from api.sampling import GenerationOptions


class RunBody(GenerationOptions):
    """Exactly one of prompt and messages. Wider than OpenAI's where the native schema is: temperature reaches 5."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: list[dict[str, Any]] | None = None
    raw: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # Refused by name: pictures, and the batch form.
    image: Any = None
    requests: Any = None


class SearchQuery(BaseModel):
    """Values arrive as text, so this one is not strict."""

    search: str | None = None
    task: str | None = None
    author: str | None = None
    source: Literal["1", "2"] | None = None
    hide_experimental: bool = False
    include_deprecated: bool = False
    format: Literal["openrouter"] | None = None
    page: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    per_page: Annotated[int, Field(ge=1, le=1_000)] = 50
