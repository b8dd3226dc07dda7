"""The local engine's process: `python -m backends.local.server --model-path …`. What it serves is in surface.py.

Most of a start is imports, and most of these are torch's. So this file is light: it says what is wrong with a command
line before torch is there, has the files read ahead that come next, and reads weights while the rest is imported.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from backends.local.errors import StartError
from backends.local.logs import configure_logs
from backends.local.read_ahead import read_ahead
from backends.local.settings import EngineSettings, parse_settings

if TYPE_CHECKING:
    from backends.local.surface import Loader

log = structlog.get_logger(__name__)

_SWITCH_S = 0.0005
"""How long the thread that imports may keep the interpreter from the one that reads weights; Python's own 5 ms would
make it wait at each of a thousand tensors."""


def main(arguments: Sequence[str], make_loader: "Callable[[EngineSettings], Loader] | None" = None) -> int:
    """Its exit code. `make_loader`: tests put a maker of engines with faults there."""
    process_s = _age_s()
    settings = parse_settings(arguments)
    configure_logs()
    if settings.exit_with_parent:
        _exit_with_parent()
    read_ahead(settings.model_path)
    usual_s = sys.getswitchinterval()
    # Imports make millions of objects that stay: looking through them for garbage again and again finds none.
    gc.disable()
    sys.setswitchinterval(_SWITCH_S)
    began = time.monotonic()
    from backends.local.loading import EngineLoader  # noqa: PLC0415  brings torch

    loader = (make_loader or EngineLoader)(settings)
    loader.begin({"process": process_s, "imports": time.monotonic() - began})
    from backends.local.wiring import run  # noqa: PLC0415  the weights are read meanwhile

    sys.setswitchinterval(usual_s)
    gc.freeze()
    gc.enable()
    try:
        run(settings, loader)
    except StartError as error:
        log.error("engine_cannot_start", reason=str(error))  # noqa: TRY400  one sentence for the operator, no traceback
        return 1
    return 0


def _age_s() -> float:
    """Since this process began, where Linux says so."""
    try:
        # Its name, in parentheses, may hold spaces; the start is the 22nd field, in ticks since the machine's.
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _exit_with_parent() -> None:
    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        log.info("parent_gone")
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
