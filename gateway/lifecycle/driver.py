"""What carries a unit's transitions out: processes of this machine, a service manager, a cluster.

Called by keeper.py, which knows states and no processes; a driver knows processes and no states. Implementations are
chosen where the deployment is read.
"""

from collections.abc import Mapping
from typing import Protocol


class Driver(Protocol):
    """One unit's. Every method bears being repeated, and raises the BackendError family with what an operator reads."""

    async def start(self) -> None:
        """Start whatever of it does not run. Returns once that is under way: whether it can be used is asked elsewhere.

        What an owner that died left running is adopted, or ended first where it can't be.
        """

    async def stop(self) -> None:
        """End all of it; returns when nothing of it runs."""

    async def release(self) -> None:
        """Let it give up the memory of weights and KV pages, and keep its processes. Nothing runs there."""

    async def resume(self) -> None:
        """Let it take back what it released."""

    async def running(self) -> bool:
        """Does all of it run, whoever started it?"""

    async def ready(self) -> bool:
        """Can it be used now?"""

    async def busy(self) -> bool:
        """Does any request run or wait there, from whichever gateway?"""

    async def start_parts(self) -> Mapping[str, float]:
        """The seconds of its latest start or resume, by part, as far as its engines say; of a pair the longer ones."""

    def last_words(self) -> str:
        """Why it does not run, as far as is known: an exit code, the end of a log. Empty: nothing is known."""

    async def leave(self) -> None:
        """The calling process is about to end. What would end with it is stopped now; what would not goes on."""
