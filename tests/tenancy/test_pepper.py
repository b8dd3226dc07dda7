"""The pepper is made once, kept private, and never replaced silently."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tenancy.database import Database
from tenancy.keys import KeyKind
from tenancy.pepper import PepperInvalid, open_pepper, open_pepper_of
from tenancy.provisioning import issue_key, open_account


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


class TestBesideADatabase:
    def test_a_new_one_is_made_for_a_new_database(self, database: Database, tmp_path: Path) -> None:
        path = tmp_path / "pepper"
        assert open_pepper_of(database, path) == open_pepper(path)

    def test_none_is_made_where_keys_would_no_longer_be_known(self, database: Database, tmp_path: Path) -> None:
        path = tmp_path / "pepper"
        pepper = open_pepper_of(database, path)
        account = open_account(database, "acme", clock=lambda: 1)
        issue_key(database, pepper, account.id, name="first", kind=KeyKind.INFERENCE, clock=lambda: 1)
        assert open_pepper_of(database, path) == pepper
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(PepperInvalid, match="restore it from a copy"):
            open_pepper_of(database, path)
        assert not path.exists()
