"""The dashboard for a test, on a database of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.dashboard.visitors import Dashboard, dashboard
from tests.tenancy.conftest import migrated_file

__all__ = ["migrated_file"]


@pytest.fixture
def site(tmp_path: Path, migrated_file: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path, migrated_file) as opened:
        yield opened
