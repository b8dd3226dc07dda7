"""Runs `pagegate` command lines against a data folder of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.cli.main import run
from tests.migrated import copy_migrated

Pagegate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a database that needs no migrating any more."""
    monkeypatch.setenv("PAGEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    copy_migrated(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def pagegate(home: Path, capsys: pytest.CaptureFixture[str]) -> Pagegate:
    """(exit code, standard output, standard error) of one command line."""

    def command(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            run(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        else:
            code = 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return command


@pytest.fixture
def answer(pagegate: Pagegate) -> Callable[..., Any]:
    """The JSON that a successful command line prints."""

    def command(*arguments: str) -> Any:
        code, out, err = pagegate(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return command
