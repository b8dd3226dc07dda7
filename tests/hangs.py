"""Ends a worker whose test never ends, so that a run of all tests ends and says which test it was.

pytest-timeout fails a test by an exception in its main thread, once. What holds that exception back, or then waits
for ever in the teardown, is left to a thread of faulthandler: it needs neither. pytest's own (`faulthandler_timeout`)
stops at the first failure; from there to the end of the teardown it is this one.
"""

import faulthandler
import os
from collections.abc import Iterator

import pytest

# Far above what any teardown takes: the services of a test close within their own bounds of 10 to 60 s.
TEARDOWN_S_MAX = pytest.StashKey[float]()
_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("teardown_timeout", "seconds after which a teardown ends its process", type="string", default="300")


def pytest_configure(config: pytest.Config) -> None:
    """A copy: while a test runs, the standard error is what pytest captures, and dies with the process."""
    config.stash[TEARDOWN_S_MAX] = float(config.getini("teardown_timeout"))
    config.stash[_STDERR] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    config = item.config
    faulthandler.dump_traceback_later(config.stash[TEARDOWN_S_MAX], exit=True, file=config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
