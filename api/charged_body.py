"""What every body that costs something may say, whatever it asks for: for whom it is, and its tags.

Schemas of the dialects extend ChargedBody, so that no route forgets whose budget a request is of.
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from api.errors import InputInvalid
from billing.attribution import (
    END_USER_CHARS_MAX,
    TAG_VALUE_CHARS_MAX,
    TAGS_MAX,
    Attribution,
    scalar_tags,
    tags_text,
)

# Without effect here by design, so not worth a word: bookkeeping of other platforms, and fields whose only harmless
# meaning is the one we give them.
SILENTLY_IGNORED: Final = frozenset(
    {
        "store", "prompt_cache_key", "prompt_cache_retention", "model",
    }
)  # fmt: skip
_IGNORED_NAMES_MAX: Final = 16
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


def _metadata(value: object) -> dict[str, str] | None:
    return None if value is None else scalar_tags(value, tags_max=TAGS_MAX)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable characters.")
    return text


EndUser = Annotated[str, Field(max_length=END_USER_CHARS_MAX), AfterValidator(_printable)]
_SCALAR = {"anyOf": [{"type": "string", "maxLength": TAG_VALUE_CHARS_MAX}, {"type": "number"}, {"type": "boolean"}]}
Metadata = Annotated[
    dict[str, str],
    BeforeValidator(_metadata),
    WithJsonSchema({"type": "object", "additionalProperties": _SCALAR, "maxProperties": TAGS_MAX}),
]


class ChargedBody(BaseModel):
    """Strict: a bool is no number and a string is no number. Fields nobody here knows are kept aside, to be named."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    # For whom and what it is: recorded, and what usage is told apart by.
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    metadata: Metadata | None = None

    def attribution(self, tags: Mapping[str, str]) -> Attribution:
        """tags: of the request's head, which go before those of its body. Raises InputInvalid."""
        named = {**(self.metadata or {}), **tags}
        if len(named) > TAGS_MAX:
            raise InputInvalid(("metadata",), f"is more than {TAGS_MAX} tags, with those of cf-aig-metadata.")
        return Attribution(self.safety_identifier or self.user or None, tags_text(named))

    def ignored(self) -> str | None:
        """Names of fields that had no effect, for a header; None if there are none. Odd names are left out."""
        if not self.model_extra:
            return None
        names = [name for name in self.model_extra if name not in SILENTLY_IGNORED and _PLAIN_NAME.fullmatch(name)]
        return ", ".join(names[:_IGNORED_NAMES_MAX]) or None


def ignored_headers(body: ChargedBody) -> Mapping[str, str]:
    names = body.ignored()
    return {} if names is None else {"x-ignored-params": names}
