"""Frames: whole ones are found, cut-off and damaged ones are told apart, and reading begins again behind damage."""

from hypothesis import given
from hypothesis import strategies as st

from billing.frames import encode, find_frame, split

payloads = st.lists(st.binary(max_size=40), max_size=6)


def _ends(records: list[bytes]) -> list[int]:
    ends, position = [], 0
    for record in records:
        position += len(encode(record))
        ends.append(position)
    return ends


@given(payloads)
def test_what_was_framed_is_found_again(records: list[bytes]) -> None:
    found = split(b"".join(map(encode, records)))
    assert [payload for payload, _ in found.frames] == records
    assert [end for _, end in found.frames] == _ends(records)
    assert not found.damaged


@given(payloads, st.data())
def test_any_cut_leaves_the_whole_frames_before_it(records: list[bytes], data: st.DataObject) -> None:
    framed = b"".join(map(encode, records))
    cut = data.draw(st.integers(0, len(framed)))
    found = split(framed[:cut])
    whole = [end for end in _ends(records) if end <= cut]
    assert [payload for payload, _ in found.frames] == records[: len(whole)]
    assert found.rest == (whole[-1] if whole else 0)
    assert not found.damaged
    assert find_frame(framed[:cut], found.rest + 1) is None


@given(st.lists(st.binary(max_size=40), min_size=2, max_size=6), st.data())
def test_one_flipped_bit_loses_one_record_and_no_other(records: list[bytes], data: st.DataObject) -> None:
    framed = bytearray(b"".join(map(encode, records)))
    bit = data.draw(st.integers(0, 8 * len(framed) - 1))
    framed[bit // 8] ^= 1 << (bit % 8)
    hit = next(index for index, end in enumerate(_ends(records)) if bit // 8 < end)

    read, offset = [], 0
    damaged = bytes(framed)
    while True:
        found = split(damaged, offset)
        read += [payload for payload, _ in found.frames]
        following = find_frame(damaged, found.rest + 1)
        if following is None:
            break
        offset = following
    assert read == records[:hit] + records[hit + 1 :]


@given(st.binary(max_size=200))
def test_bytes_at_random_are_never_a_record(noise: bytes) -> None:
    assert split(noise).frames == []


def test_zeros_are_damage_and_no_empty_record() -> None:
    # A crash may leave a hole of zeros where data had not reached the disk.
    found = split(bytes(64))
    assert (found.frames, found.damaged) == ([], True)
