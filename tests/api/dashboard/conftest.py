"""The dashboard for a test, on a database of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.dashboard.visitors import Dashboard, dashboard


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as opened:
        yield opened
