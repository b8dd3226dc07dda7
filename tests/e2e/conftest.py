"""Fixtures of the end-to-end tests: a tokenizer, a scripted engine, a gateway in front of it, a systemctl."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service, running_service
from tests.engines import build_tiny_checkpoint

# Notes every call, and keeps a unit's state in a file of its name.
SYSTEMCTL = """#!/bin/sh
here=$(dirname "$0")
for unit; do :; done
echo "$2 $unit" >> "$here/calls"
case "$2" in
  start) echo active > "$here/$unit" ;;
  stop) echo inactive > "$here/$unit" ;;
  is-active) cat "$here/$unit" 2> /dev/null || echo inactive ;;
esac
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real tokenizer and chat template; its weights are never read here."""
    return build_tiny_checkpoint(tmp_path_factory.mktemp("e2e") / "tiny")


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
async def service(tmp_path: Path, checkpoint: Path, engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with running_service(tmp_path / "home", checkpoint, engine) as service:
        yield service


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return program
