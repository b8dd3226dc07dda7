"""What is far too long is told so after a part of it was counted; whatever may fit is left to be tokenised."""

import pytest

from gateway.errors import PromptTooLong
from gateway.overlong import refuse_overlong


class Counts:
    """Counts a token for so many characters, and the characters that it was asked about."""

    def __init__(self, chars_a_token: int) -> None:
        self._chars_a_token = chars_a_token
        self.chars = 0

    def __call__(self, piece: str) -> int:
        self.chars += len(piece)
        return len(piece) // self._chars_a_token


def test_a_text_far_beyond_the_limit_is_counted_as_far_as_that_shows() -> None:
    count = Counts(1)
    with pytest.raises(PromptTooLong, match="more than 16382 tokens") as refused:
        refuse_overlong("x" * (8 << 20), 8_191, count)
    assert count.chars == 1 << 16
    assert refused.value.limit_tokens == 8_191


def test_the_number_is_exact_where_the_text_was_counted_in_one_piece() -> None:
    with pytest.raises(PromptTooLong, match="has 65536 tokens; this model takes at most 8191 ") as refused:
        refuse_overlong("x" * (1 << 16), 8_191, Counts(1))
    assert refused.value.prompt_tokens == 1 << 16


def test_a_text_that_is_short_enough_is_not_looked_at() -> None:
    count = Counts(1)
    refuse_overlong("x" * 8 * 8_191, 8_191, count)
    assert count.chars == 0


def test_only_more_than_twice_the_limit_is_certain() -> None:
    refuse_overlong("x" * 16 * 20_000, 10_000, Counts(16))
    with pytest.raises(PromptTooLong):
        refuse_overlong("x" * 16 * 20_001, 10_000, Counts(16))
