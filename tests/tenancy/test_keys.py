"""Key texts: what is accepted as one, and that nothing else reaches a look-up."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenancy.errors import KeyMalformed, KeyMissing
from tenancy.keys import KeyKind, check_format, checksum, hash_key, hint, new_key_text, without_keys

_BASE62 = string.digits + string.ascii_letters
_PEPPER = bytes(32)

kinds = st.sampled_from(KeyKind)


def test_a_new_key_has_the_published_form() -> None:
    assert re.fullmatch(r"pgi_live_[0-9A-Za-z]{46}", new_key_text(KeyKind.INFERENCE))
    assert re.fullmatch(r"pga_live_[0-9A-Za-z]{46}", new_key_text(KeyKind.ADMIN))


@given(kinds)
def test_a_new_key_passes_its_own_check(kind: KeyKind) -> None:
    text = new_key_text(kind)
    assert check_format(text) == text


def test_new_keys_differ() -> None:
    assert len({new_key_text(KeyKind.INFERENCE) for _ in range(1_000)}) == 1_000


@given(kinds, st.integers(0, 54), st.sampled_from(_BASE62))
def test_one_wrong_character_is_refused(kind: KeyKind, index: int, character: str) -> None:
    text = new_key_text(kind)
    changed = text[:index] + character + text[index + 1 :]
    if changed == text:
        return
    with pytest.raises(KeyMalformed):
        check_format(changed)


@given(kinds, st.integers(0, 53))
def test_two_swapped_neighbours_are_refused(kind: KeyKind, index: int) -> None:
    text = new_key_text(kind)
    changed = text[:index] + text[index + 1] + text[index] + text[index + 2 :]
    if changed == text:
        return
    with pytest.raises(KeyMalformed):
        check_format(changed)


@given(st.text(max_size=80))
def test_no_other_text_is_taken_for_a_key(text: str) -> None:
    with pytest.raises(KeyMalformed if text else KeyMissing):
        check_format(text)


@pytest.mark.parametrize("token", [None, ""])
def test_no_token_is_a_missing_key(token: str | None) -> None:
    with pytest.raises(KeyMissing):
        check_format(token)


def test_a_text_is_shown_without_the_keys_in_it() -> None:
    key = new_key_text(KeyKind.ADMIN)
    assert (
        without_keys(f"No file {key!r}, {key[:20]} or {hint(key)}.")
        == f"No file 'pga_live_…', pga_live_… or {hint(key)}."
    )


def test_a_trailing_newline_is_refused() -> None:
    with pytest.raises(KeyMalformed):
        check_format(new_key_text(KeyKind.INFERENCE) + "\n")


def test_the_kind_letter_is_under_the_checksum() -> None:
    text = new_key_text(KeyKind.INFERENCE)
    with pytest.raises(KeyMalformed):
        check_format("pga" + text[3:])


@given(st.text(_BASE62, max_size=60))
def test_a_checksum_is_six_base62_digits(body: str) -> None:
    assert re.fullmatch(r"[0-9A-Za-z]{6}", checksum(body))


def test_the_checksum_never_changes_its_meaning() -> None:
    assert checksum("pgi_live_" + "0" * 40) == "4LiCnf"


def test_the_hash_depends_on_the_pepper_and_never_shows_the_key() -> None:
    text = new_key_text(KeyKind.INFERENCE)
    first, second = hash_key(text, _PEPPER), hash_key(text, bytes([1]) * 32)
    assert first != second
    assert len(first) == 64
    assert text[9:] not in first


def test_the_hint_shows_four_characters_of_the_secret() -> None:
    text = new_key_text(KeyKind.INFERENCE)
    assert hint(text) == "pgi_live_…" + text[-4:]
