"""What all tests share. Hypothesis draws the same examples everywhere and judges no example by its time: a busy machine
is no failure.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.distribution import Distribution, dearest_first

settings.register_profile("pagegate", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("pagegate")


_SERVER_FIXTURES = frozenset({"postgres", "valkey"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks for a real server, or for the parameter that is one, carries the mark `stores`."""
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        parameter = item.name.partition("[")[2]
        if asked & _SERVER_FIXTURES or "postgresql" in parameter or "valkey" in parameter:
            item.add_marker(pytest.mark.stores)
    items[:] = dearest_first(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Distribution | None:
    """None: as xdist does it."""
    return Distribution(config, log) if config.getoption("dist") == "loadfile" else None
