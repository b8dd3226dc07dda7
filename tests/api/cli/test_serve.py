"""What a start finds in its data folder: whole, or named in one sentence that says what to do."""

from pathlib import Path

import pytest

from api.cli.serve import ServeFailed, prepare
from api.settings import Settings
from tenancy.pepper import PepperInvalid
from tests.migrated import copy_migrated

URL = "http://127.0.0.1:1"


@pytest.fixture
def started(tmp_path: Path) -> Settings:
    """Of a service that has started once, in front of an engine elsewhere."""
    home = tmp_path / "home"
    engine = {"url": "http://127.0.0.1:2", "checkpoint": tmp_path}
    settings = Settings.model_validate(
        {"home": home, "cache_dir": tmp_path, "engine": engine, "embedding_model_id": ""}
    )
    copy_migrated(home)
    assert prepare(settings, base_url=URL) is not None
    return settings


def test_the_second_start_finds_what_the_first_has_made(started: Settings) -> None:
    first = started.bootstrap_path.read_bytes()
    found = prepare(started, base_url=URL)
    assert found is not None
    assert found["api_key"].encode() in first


@pytest.mark.parametrize("content", [b"", b'{"base_url":', b"[]"])
def test_a_damaged_file_of_first_keys_is_named(started: Settings, content: bytes) -> None:
    started.bootstrap_path.write_bytes(content)
    with pytest.raises(ServeFailed, match=r"bootstrap\.json is damaged"):
        prepare(started, base_url=URL)


def test_a_lost_pepper_is_not_made_anew_unheard(started: Settings) -> None:
    started.pepper_path.unlink()
    with pytest.raises(PepperInvalid, match="restore it from a copy"):
        prepare(started, base_url=URL)
    assert not started.pepper_path.exists()
