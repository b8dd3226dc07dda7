"""What a process that serves asks of its system."""

import resource
from collections.abc import Iterator

import pytest

from api.serving import allow_many_connections


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
