"""An application over fakes, for the tests of routes."""

import pytest
from starlette.types import ASGIApp

from api.app import create_app
from tests.fakes import Fakes


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def app(fakes: Fakes) -> ASGIApp:
    return create_app(fakes.services)
