"""Becomes a command that ends when its launcher does: for engines of others, which watch no pipe of ours. Linux only.

    python -m backends.leash LAUNCHER_PID COMMAND…

drivers/processes.py puts it before SGLang's command. The kernel sends SIGTERM when the launcher's thread dies, however
it dies, and keeps to that over exec, so that no process stands between the two. Elsewhere the command starts all the
same, and what outlives its launcher is ended before the next start (supervision.py).
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # of linux/prctl.h


def leashed(command: Sequence[str], launcher: int) -> tuple[str, ...]:
    """To execute instead of `command`. launcher: the process that starts it, and whose end ends it."""
    return (sys.executable, "-m", "backends.leash", str(launcher), *command)


def main(arguments: Sequence[str]) -> None:
    launcher, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:
            return  # it died before the kernel was asked
    os.execvp(command[0], tuple(command))  # noqa: S606  this program is there to become another


if __name__ == "__main__":
    main(sys.argv[1:])
