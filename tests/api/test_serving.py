"""What a process that serves asks of its system."""

import asyncio
import resource
import signal
from collections.abc import Iterator

import pytest

from api.serving import allow_many_connections, hearing_hangups, hold_hangups
from tests.doubles.waiting import PATIENCE_S


@pytest.fixture
def hard() -> Iterator[int]:
    """The most files that this process may be allowed; what it was allowed comes back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_shells_limit_of_open_files_is_raised(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
    allow_many_connections()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (65_536 if hard < 0 else min(hard, 65_536), hard)


def test_a_higher_one_stays(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allow_many_connections()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.fixture
def held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    hold_hangups()
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("held")
async def test_a_hangup_that_comes_before_there_is_something_to_reload_waits_for_it() -> None:
    for _ in range(2):
        signal.raise_signal(signal.SIGHUP)
        heard = asyncio.Event()
        with hearing_hangups(heard.set):
            async with asyncio.timeout(PATIENCE_S):
                await heard.wait()
    assert signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ())
