"""The local engine's process: `python -m backends.local.server --model-path …`. What it serves is in surface.py."""

import os
import sys
import threading
from collections.abc import Callable, Sequence

import structlog
import uvloop

from backends.local.errors import StartError
from backends.local.loading import EngineLoader
from backends.local.logs import configure_logs
from backends.local.settings import EngineSettings, parse_settings
from backends.local.surface import Loader, serve

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str], make_loader: Callable[[EngineSettings], Loader] = EngineLoader) -> int:
    """Its exit code. `make_loader`: tests put a maker of engines with faults there."""
    settings = parse_settings(arguments)
    configure_logs()
    if settings.exit_with_parent:
        _exit_with_parent()
    try:
        uvloop.run(serve(settings, make_loader(settings)))
    except StartError as error:
        log.error("engine_cannot_start", reason=str(error))  # noqa: TRY400  one sentence for the operator, no traceback
        return 1
    return 0


def _exit_with_parent() -> None:
    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        log.info("parent_gone")
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
