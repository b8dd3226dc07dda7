"""What the OpenAI dialect reads: the bodies of /chat/completions and /completions. Pure shapes; translate.py gives them
meaning.
"""

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, WithJsonSchema

from api.body_shapes import MESSAGES, PROMPT
from api.sampling import GenerationOptions

_TOKEN_ID_MAX: Final = 2**31 - 1

Model = Annotated[str, Field(min_length=1)]


class ChatBody(GenerationOptions):
    model: Model
    messages: Annotated[list[dict[str, Any]], WithJsonSchema(MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def _prompt(value: object) -> str | tuple[int, ...]:
    """One prompt, as text or token ids, alone or in a list of one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("several prompts in one request are not served; send one request for each.")
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token <= _TOKEN_ID_MAX for token in value):
        return tuple(value)
    raise ValueError("must be a text that is not empty, or a list of token ids.")


class CompletionBody(GenerationOptions):
    """echo, suffix and best_of are accepted with the values that change nothing."""

    model: Model
    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_prompt), WithJsonSchema(PROMPT)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Annotated[bool | None, WithJsonSchema({"enum": [False, None]})] = None
    suffix: Annotated[str | None, WithJsonSchema({"enum": ["", None]})] = None
    best_of: Annotated[int, Field(ge=1)] | None = None
