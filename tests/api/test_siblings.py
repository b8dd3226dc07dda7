"""Questions among workers: everybody's answer, nobody waits for one that hangs or is gone, and bad answers are none."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from api import siblings
from api.siblings import ALONE, Siblings, answering, socket_path


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


async def _echo(words: dict[str, Any]) -> dict[str, Any]:
    return words


async def _hang(_words: dict[str, Any]) -> None:
    await asyncio.Event().wait()


async def test_who_hangs_is_waited_for_no_longer_than_the_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "ANSWER_S_MAX", 0.1)
    async with answering(folder, "2", {"q": _hang}):
        assert await Siblings(folder, "1", ["2"]).ask("q") == {}


async def test_all_that_answer_are_heard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "ANSWER_S_MAX", 30)
    asks = Siblings(folder, "1", ["2", "4", "5"], beside=["billing"])
    socket_path(folder, "5").touch()  # what a killed one left
    async with answering(folder, "2", {"q": _echo}):
        assert await asks.ask("q", x=[1]) == {"2": {"x": [1]}}
        async with answering(folder, "5", {"q": _echo}), answering(folder, "billing", {"q": _echo}):
            assert set(await asks.ask("q", beside_too=True)) == {"2", "5", "billing"}
            assert set(await asks.ask("q")) == {"2", "5"}
    assert not socket_path(folder, "2").exists()


async def test_a_question_that_fails_is_logged_there_and_no_answer_here(folder: Path) -> None:
    async with answering(folder, "2", {"q": _echo}):
        with structlog.testing.capture_logs() as logs:
            assert await Siblings(folder, "1", ["2"]).ask("unknown") == {}
    assert [line["event"] for line in logs] == ["a sibling's question failed"]


async def test_a_longer_answer_is_read_whole(folder: Path) -> None:
    async with answering(folder, "2", {"q": _echo}):
        words = "x" * 60_000
        assert await Siblings(folder, "1", ["2"]).ask("q", words=words) == {"2": {"words": words}}


async def test_who_is_alone_asks_nobody() -> None:
    assert await ALONE.ask("q", beside_too=True) == {}
