"""The body of /responses: one question as a text or as items, without stored prompts or background work.

Pure shape; responses_translate.py gives it meaning. Refusals name the parameter, so that a client knows what to drop.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from api.errors import InputInvalid, ParameterUnsupported
from api.openai.schemas import Model
from api.sampling import GenerationOptions

# What this asks for is in every answer already, or never: agents send it as a matter of course.
_HARMLESS_INCLUDE: Final = frozenset({"reasoning.encrypted_content"})
_NOT_KEPT: Final = "conversations are not kept by a name; use previous_response_id."


class ResponsesBody(GenerationOptions):
    model: Model
    input: Annotated[str, Field(min_length=1)] | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    # Kept for a time if it is true: unlike at OpenAI's own, nothing that a model wrote is kept unasked.
    store: bool | None = None
    previous_response_id: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    # Accepted in their harmless form only; see `refuse_unserved`.
    background: bool | None = None
    conversation: Any = None
    include: list[str] | None = None
    prompt: Any = None
    text: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def output_tokens(self) -> int | None:
        """Raises InputInvalid if it was asked for under two names, differently."""
        other = super().output_tokens
        if self.max_output_tokens is not None and other not in {None, self.max_output_tokens}:
            raise InputInvalid(("max_output_tokens",), "differs from max_tokens; give one of them.")
        return self.max_output_tokens or other

    @property
    def answer_format(self) -> tuple[tuple[str, ...], Any]:
        return ("text", "format"), (self.text or {}).get("format")

    def refuse_unserved(self) -> None:
        """Refuse what would change the answer's meaning if it were ignored."""
        if self.conversation is not None:
            raise ParameterUnsupported(("conversation",), _NOT_KEPT)
        if self.prompt is not None:
            raise ParameterUnsupported(("prompt",), "stored prompts are not served; send input and instructions.")
        if self.background:
            raise ParameterUnsupported(("background",), "answers in the background are not served.")
        if self.truncation == "auto":
            raise ParameterUnsupported(
                ("truncation",), "nothing is dropped from an input here; only 'disabled' is served."
            )
        if self.top_logprobs:
            raise ParameterUnsupported(("top_logprobs",), "log-probabilities are not served on this route.")
        for index, wanted in enumerate(self.include or ()):
            if wanted not in _HARMLESS_INCLUDE:
                raise ParameterUnsupported(("include", index), "is not served.")
        if self.response_format is not None:
            raise ParameterUnsupported(("response_format",), "this route reads text.format.")
        if (self.n or 1) > 1:
            raise ParameterUnsupported(("n",), "this route gives one answer.")
        if self.asks_for_lora:
            raise ParameterUnsupported(("lora",), "adapters are not served.")
