import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.local.detokenizer import TextStream

TEXT = "aß北🙂 done"
ONE_BYTE_TOKENS = [bytes([byte]) for byte in range(256)]


def splits(data: bytes) -> list[list[bytes]]:
    """Every way to cut the bytes into up to three tokens."""
    cuts = itertools.combinations_with_replacement(range(len(data) + 1), 2)
    return [[data[:first], data[first:second], data[second:]] for first, second in cuts]


def stream(tokens: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    text = TextStream(tokens, stop)
    pieces = [text.push(token) for token in range(len(tokens))]
    return [*pieces, text.flush()], text.matched_stop


def test_no_token_border_ever_shows_half_a_character() -> None:
    for tokens in splits(TEXT.encode()):
        pieces, _ = stream(tokens)
        assert "".join(pieces) == TEXT
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_shown_as_a_replacement_at_the_end_only() -> None:
    pieces, _ = stream([b"a", "🙂".encode()[:3]])
    assert pieces == ["a", "", "\ufffd"]


@given(st.binary(max_size=40))
def test_the_pieces_of_any_bytes_make_the_decoded_whole(data: bytes) -> None:
    text = TextStream(ONE_BYTE_TOKENS)
    shown = "".join([text.push(byte) for byte in data] + [text.flush()])
    assert shown == data.decode(errors="replace")


@pytest.mark.parametrize("stop", ["北", "🙂 d", "done", "aß北🙂 done", "ß"])
def test_a_stop_string_cuts_exactly_wherever_tokens_split_it(stop: str) -> None:
    for tokens in splits(TEXT.encode()):
        pieces, matched = stream(tokens, (stop,))
        assert "".join(pieces) == TEXT[: TEXT.find(stop)]
        assert matched == stop


def test_the_beginning_of_a_stop_string_is_held_back_and_then_shown() -> None:
    text = TextStream([b"a<", b"/", b"b"], ("</s>",))
    assert [text.push(0), text.push(1), text.push(2), text.flush()] == ["a", "", "</b", ""]


def test_what_is_held_back_is_shown_at_the_end() -> None:
    pieces, matched = stream([b"a<", b"/s"], ("</s>",))
    assert "".join(pieces) == "a</s"
    assert matched is None


def test_the_stop_that_ends_first_wins() -> None:
    for tokens in splits(b"one two three"):
        pieces, matched = stream(tokens, ("two three", "wo", "three"))
        assert ("".join(pieces), matched) == ("one t", "wo")


def test_an_id_that_no_token_stands_for_shows_nothing() -> None:
    assert TextStream([b"a"]).push(7) == ""


def test_nothing_is_shown_after_a_stop() -> None:
    text = TextStream([b"a.", b"b"], (".",))
    assert [text.push(0), text.push(1), text.flush()] == ["a", "", ""]


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_stops_do_not_depend_on_where_tokens_split_the_text(text: str, stops: list[str]) -> None:
    data = text.encode()
    whole, matched_whole = stream([data], tuple(stops))
    single, matched_single = stream([data[at : at + 1] for at in range(len(data))], tuple(stops))
    assert "".join(whole) == "".join(single)
    assert matched_whole == matched_single
