"""What all tests share. Hypothesis judges no example by its time: a busy machine is no failure.

Profiles of Hypothesis: "pagegate" wherever all tests run (`make test`, CI), and "fast" (`make test-fast`), which draws
a quarter as many examples of each property; both draw the same ones in every run (decision 0147). "search"
(`make test-search`) draws ten times as many, at random. A test that says how many it needs says it by `examples`, which
heeds all three.
Threads of torch wait for each other asleep, here and in the processes that tests start, and texts are tokenised by the
thread that asks, as in the service.
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.distribution import Distribution, dearest_first
from tests.same_examples import draw_the_same_examples
from tests.sharing_statements import share_statements

pytest_plugins = ["tests.hangs", "tests.stores"]

settings.register_profile(
    "search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, max_examples=1_000
)
settings.register_profile("pagegate", settings.get_profile("search"), derandomize=True, max_examples=100)
settings.register_profile("fast", settings.get_profile("pagegate"), max_examples=25)
settings.load_profile("pagegate")
draw_the_same_examples()
share_statements()
# As api/logs.py has it: structlog's own drawing of a traceback, with code and locals, takes half a second once.
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.dev.ConsoleRenderer(colors=False),
    ]
)
# Nothing that is imported or collected dies: see pytest_collection_finish.
gc.disable()

# torch reads it as it is imported. Spinning takes the core from the very thread that is waited for, wherever more runs
# than there are cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # noqa: TID251  of the tests' own processes
# As api/settings.py has it: a service that runs in a test's own process would start a pool of threads otherwise.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # noqa: TID251  of the tests' own processes

_SERVER_FIXTURES = frozenset({"postgres", "valkey"})


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Whatever asks for a real server, or for the parameter that is one, carries the mark `stores`. What is left once
    `-k` and `-m` have chosen is put in order: a file that has lost its dear tests is not dear.
    """
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        parameter = item.name.partition("[")[2]
        if asked & _SERVER_FIXTURES or "postgresql" in parameter or "valkey" in parameter:
            item.add_marker(pytest.mark.stores)
    yield
    items[:] = dearest_first(items)


def pytest_collection_finish() -> None:
    """As api/serving.py does: tests and modules stay to the end, and the collector looked at all of them over and over.
    It still runs, more rarely, and pytest lets it run in full at the end.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Distribution | None:
    """None: as xdist does it."""
    return Distribution(config, log) if config.getoption("dist") == "loadfile" else None
