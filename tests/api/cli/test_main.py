"""What goes wrong is one sentence on standard error, or one JSON object where JSON was asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.cli.conftest import Pagegate

NOBODY = "0" * 32


def error_of(said: str) -> Any:
    """The one JSON document on standard error."""
    return json.loads(said)["error"]


class TestFailures:
    def test_are_a_sentence(self, pagegate: Pagegate) -> None:
        code, out, err = pagegate("keys", "list", NOBODY)
        assert (code, out) == (1, "")
        assert err.startswith("pagegate: ")

    def test_are_json_where_json_was_asked_for(self, pagegate: Pagegate) -> None:
        code, out, err = pagegate("keys", "list", NOBODY, "--json")
        assert (code, out) == (1, "")
        assert error_of(err)["code"] == "account_not_found"
        assert error_of(err)["message"]

    @pytest.mark.parametrize("words", [["keys", "list"], ["accounts", "open", "--nonsense"], ["nonsense"]])
    def test_of_the_command_line_are_json_too(self, pagegate: Pagegate, words: list[str]) -> None:
        code, out, err = pagegate(*words, "--json")
        assert (code, out) == (2, "")
        assert error_of(err)["code"] == "usage"

    def test_exit_codes_of_commands_stay_what_they_are(self, pagegate: Pagegate, tmp_path: Path) -> None:
        """`check` answers, and says by its exit code that what it found is bad."""
        file = tmp_path / "d.toml"
        file.write_text("[[models]]\nid = 1\n")
        assert pagegate("config", "check", str(file), "--json")[0] == pagegate("config", "check", str(file))[0] == 1


class TestDataFolder:
    @pytest.mark.load
    @pytest.mark.parametrize("home", ["/dev/null/pagegate", "/proc/pagegate"])
    @pytest.mark.parametrize("command", [["serve"], ["accounts", "list"]])
    def test_one_that_cannot_be_made_is_a_sentence(self, home: str, command: list[str]) -> None:
        ended = subprocess.run(
            [sys.executable, "-c", f"from api.cli.main import run; run({command})"],
            env=os.environ | {"PAGEGATE_HOME": home, "PAGEGATE_PORT": "0"},  # noqa: TID251 - a process of its own
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith("pagegate: ")
        assert "/pagegate" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1

    def test_one_that_cannot_be_written_is_a_sentence(self, pagegate: Pagegate, home: Path) -> None:
        (home / "pagegate.db").unlink()
        (home / "pagegate.db").mkdir()  # a database that can't be opened, whoever asks
        code, _, err = pagegate("accounts", "list", "--json")
        assert code == 1
        assert error_of(err) == {
            "code": "tenancy_unavailable",
            "message": "The database can't be used: unable to open database file.",
        }

    def test_a_damaged_database_is_named_by_every_command(self, pagegate: Pagegate, home: Path) -> None:
        (home / "pagegate.db").write_bytes(bytes(range(256)) * 64)
        for command in (("accounts", "list"), ("prices", "list"), ("ledger", "check")):
            assert pagegate(*command) == (1, "", "pagegate: The database can't be used: file is not a database.\n")

    def test_without_a_home_directory_it_has_to_be_named(
        self, pagegate: Pagegate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def nowhere() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("PAGEGATE_HOME")
        monkeypatch.delenv("XDG_DATA_HOME", raising=False)
        monkeypatch.setattr(Path, "home", nowhere)
        code, _, err = pagegate("accounts", "list")
        assert code == 1
        assert "PAGEGATE_HOME must" in err
        monkeypatch.setenv("PAGEGATE_HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert "PAGEGATE_CACHE_DIR must" in pagegate("accounts", "list")[2]
        monkeypatch.setenv("PAGEGATE_CACHE_DIR", str(tmp_path))
        assert pagegate("accounts", "list")[0] == 0
