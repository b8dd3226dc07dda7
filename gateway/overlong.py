"""Texts that are far beyond what a model takes, found without tokenising them to their end. Pure.

Used by prompt.py and embedding.py. Megabytes take seconds to tokenise, others' prompts wait behind them, and nobody
would be charged for it.
"""

from collections.abc import Callable
from typing import Final

from gateway.errors import PromptTooLong

# Natural language has half as many characters to a token; what has fewer is short enough to be tokenised whole.
_CHARS_A_TOKEN: Final = 8
_PIECE_CHARS: Final = 1 << 16


def refuse_overlong(
    text: str,
    limit_tokens: int,
    count: Callable[[str], int],
    *,
    too_long: Callable[..., PromptTooLong] = PromptTooLong,
) -> None:
    """Raises PromptTooLong for a text of more than twice the limit: by less, cutting it could change its tokens.

    count: the tokens of a piece of the text. too_long: the error, with words of the caller's own.
    """
    if len(text) <= _CHARS_A_TOKEN * limit_tokens:
        return
    counted = 0
    for start in range(0, len(text), _PIECE_CHARS):
        counted += count(text[start : start + _PIECE_CHARS])
        if counted > 2 * limit_tokens:
            if len(text) <= _PIECE_CHARS:
                raise too_long(prompt_tokens=counted, limit_tokens=limit_tokens)
            raise too_long(prompt_tokens=2 * limit_tokens, limit_tokens=limit_tokens, at_least=True)
