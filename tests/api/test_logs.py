"""What a process of ours writes of a failure that the standard library logs: where it was, and nobody's words; and that
it goes on where nothing can be written.
"""

import errno
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from api.logs import configure_logging
from api.settings import Settings


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Logging belongs to the process."""
    configured, root = structlog.get_config(), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.configure(**configured)
    root.handlers[:] = handlers
    root.setLevel(level)


def fail(prompt: str) -> None:
    raise ValueError(len(prompt))


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_failure_that_asyncio_logs_says_where_and_not_with_which_values(
    tmp_path: Path, log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(Settings.model_validate({"home": tmp_path, "cache_dir": tmp_path, "log_format": log_format}))
    try:
        fail("words" * 2)
    except ValueError:
        logging.getLogger("asyncio").exception("a task failed")
    told = capsys.readouterr().err
    assert "a task failed" in told
    assert "in fail" in told
    assert "ValueError: 10" in told
    assert "wordswords" not in told
    assert log_format == "console" or "in fail" in orjson.loads(told)["exception"]


class Disk(io.RawIOBase):
    """Under a log file."""

    full = True
    kept = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.kept += bytes(data)
        return len(data)


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_lines_that_can_not_be_written_are_lost_and_stop_nothing(
    tmp_path: Path, log_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(disk)))
    configure_logging(Settings.model_validate({"home": tmp_path, "cache_dir": tmp_path, "log_format": log_format}))
    log = structlog.get_logger("tests of logs")
    for number in range(100):  # more than any buffer holds
        log.info("lost", number=number, words="w" * 1_000)
    disk.full = False
    log.info("written")
    assert b"written" in disk.kept.splitlines()[-1]
