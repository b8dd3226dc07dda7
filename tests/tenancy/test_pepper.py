"""The pepper is made once, kept private, and never replaced silently."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tenancy.pepper import PepperInvalid, open_pepper


def test_it_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "pepper"
    pepper = open_pepper(path)
    assert len(pepper) == 32
    assert open_pepper(path) == pepper
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_those_who_start_together_get_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pepper"
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: open_pepper(path), range(32)))
    assert len(found) == 1


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_damaged_one_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pepper"
    path.write_bytes(content)
    with pytest.raises(PepperInvalid, match="pepper"):
        open_pepper(path)
    assert path.read_bytes() == content
