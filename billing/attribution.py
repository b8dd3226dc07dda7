"""For whom and for what a client says a request is: its end user, and tags. Bounded words; pure.

The API layer makes an Attribution, the durable record carries it, attributed_usage.py sums by it. It is the client's
own data: it stands in no metric and in no log line.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from tenancy.values import value

END_USER_CHARS_MAX: Final = 256
TAG_NAME_CHARS_MAX: Final = 64
TAG_VALUE_CHARS_MAX: Final = 256
TAGS_MAX: Final = 16  # as many as OpenAI's metadata has


@value
class Attribution:
    """tags: a JSON object of texts, its names in order, as it is recorded; None of nobody and nothing."""

    end_user: str | None = None
    tags: str | None = None


UNATTRIBUTED: Final = Attribution()


def tags_text(tags: Mapping[str, str]) -> str | None:
    """Tags as they are recorded."""
    if not tags:
        return None
    assert len(tags) <= TAGS_MAX, "whoever reads tags bounds them"
    return orjson.dumps(dict(tags), option=orjson.OPT_SORT_KEYS).decode()


def read_tags(text: str | None) -> dict[str, str]:
    tags: dict[str, str] = {} if text is None else orjson.loads(text)
    return tags


def tag_word(name: str, content: str) -> str:
    """How one tag is named among others: "team=search"."""
    return f"{name}={content}"


def scalar_tags(found: object, *, tags_max: int) -> dict[str, str]:
    """A JSON object of few short names and texts, numbers or truths, as texts.

    Raises ValueError, with words for who sent it.
    """
    if not isinstance(found, dict):
        raise ValueError("must be a JSON object.")  # noqa: TRY004 - pydantic and callers read ValueError
    if len(found) > tags_max:
        raise ValueError(f"must have at most {tags_max} entries.")
    return {_name(name): _content(name, content) for name, content in found.items()}


def _name(name: str) -> str:
    if not 1 <= len(name) <= TAG_NAME_CHARS_MAX or not name.isprintable() or "=" in name:
        raise ValueError(f"names must be 1 to {TAG_NAME_CHARS_MAX} printable characters without '='.")
    return name


def _content(name: str, content: Any) -> str:
    if isinstance(content, bool):
        return "true" if content else "false"
    if not isinstance(content, str | int | float):
        raise ValueError(f"{name}: must be a text, a number or a boolean.")  # noqa: TRY004 - as above
    text = content if isinstance(content, str) else orjson.dumps(content).decode()
    if len(text) > TAG_VALUE_CHARS_MAX or not text.isprintable():
        raise ValueError(f"{name}: must be at most {TAG_VALUE_CHARS_MAX} printable characters.")
    return text
