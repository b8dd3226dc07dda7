"""A gateway in front of the real local engine on the tiny checkpoint, for tests of what only an engine can show."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tests.doubles.engine import ScriptedEngine
from tests.e2e.service import Service, running_service
from tests.engines import start_local_engine


@dataclass(frozen=True)
class _LocalEngine:
    """Of the double, what the service asks for: where it is. What it runs, the gateway's own invariants tell."""

    url: str
    live: tuple[str, ...] = ()


@contextlib.asynccontextmanager
async def running_local_service(
    home: Path, checkpoint: Path, *, module: str = "backends.local.server", **flags: Any
) -> AsyncIterator[Service]:
    """module: what is run as the engine. flags: of its command line. The service's `engine` has no script."""
    with start_local_engine(checkpoint, module=module, **flags) as engine:
        double = cast("ScriptedEngine", _LocalEngine(engine.url))
        async with running_service(home, checkpoint, double) as service:
            yield service
