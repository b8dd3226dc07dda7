"""What a process of ours writes of a failure that the standard library logs: where it was, and nobody's words."""

import logging
from collections.abc import Iterator
from pathlib import Path

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
