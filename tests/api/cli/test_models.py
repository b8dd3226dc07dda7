import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli.models import _TenthLines, app, pull_showing_progress
from backends.checkpoints import (
    CHECKPOINTS,
    CONVERTER_VERSION,
    DEFAULT_CHECKPOINT,
    EMBEDDING_CHECKPOINT,
    MANIFEST_NAME,
    Manifest,
    checkpoint_path,
)
from tests.backends.range_server import closed_port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PAGEGATE_HOME": str(tmp_path / "home"), "PAGEGATE_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def ready_folder(tmp_path: Path) -> Path:
    """A folder that counts as the default checkpoint, pulled."""
    folder = checkpoint_path(DEFAULT_CHECKPOINT, tmp_path / "cache")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"12345")
    wheel_sha256 = CHECKPOINTS[DEFAULT_CHECKPOINT].wheel_sha256
    manifest = Manifest(CONVERTER_VERSION, wheel_sha256, gguf_sha256="", model_sha256="", model_bytes=5)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest.as_dict()))
    return folder


def test_list_says_what_the_cache_lacks(environment: dict[str, str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["list", "--json"], env=environment)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [
        {
            "name": name,
            "ready": False,
            "path": str(checkpoint_path(name, tmp_path / "cache")),
            "source": CHECKPOINTS[name].requirement,
            "download_bytes": CHECKPOINTS[name].wheel_bytes,
        }
        for name in (DEFAULT_CHECKPOINT, EMBEDDING_CHECKPOINT)
    ]


def test_list_for_people_shows_names_and_state(environment: dict[str, str], ready_folder: Path) -> None:
    result = CliRunner().invoke(app, ["list"], env=environment | {"COLUMNS": "200"})
    assert DEFAULT_CHECKPOINT in result.stdout
    assert "yes" in result.stdout


def test_pull_of_what_is_there_fetches_nothing(environment: dict[str, str], ready_folder: Path) -> None:
    result = CliRunner().invoke(app, ["pull", "--json"], env=environment)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"name": DEFAULT_CHECKPOINT, "ready": True, "path": str(ready_folder)}


def test_an_unknown_name_is_one_sentence_and_a_failure(environment: dict[str, str]) -> None:
    result = CliRunner().invoke(app, ["pull", "nonesuch"], env=environment)
    assert result.exit_code == 1
    assert result.stdout == ""
    known = f"{EMBEDDING_CHECKPOINT}, {DEFAULT_CHECKPOINT}"
    assert result.stderr == f"There is no checkpoint named 'nonesuch'; known: {known}.\n"


def test_no_network_is_one_sentence_with_a_code_in_json(environment: dict[str, str]) -> None:
    offline = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_INDEX_URL": f"http://127.0.0.1:{closed_port()}/simple",
    }
    result = CliRunner().invoke(app, ["pull", "--json"], env=environment | offline)
    assert result.exit_code == 1
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "checkpoint_unreachable"
    assert error["message"].startswith("No network")


def test_a_ready_checkpoint_needs_no_progress(tmp_path: Path, ready_folder: Path) -> None:
    assert pull_showing_progress(DEFAULT_CHECKPOINT, tmp_path / "cache") == ready_folder


def test_progress_off_a_terminal_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    say = _TenthLines("tiny")
    for here in range(0, 1001, 7):
        say(here, 1000)
    say(1000, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[5] == "Fetching tiny: 50 % (0 of 0 MB)"
    assert lines[-1].startswith("Converting tiny")
