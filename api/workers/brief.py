"""What a supervisor tells a process that it starts: one JSON line on its standard input, which then stays open.

The settings are those that the supervisor has read, so that a process which is started again serves as the others do;
and they hold passwords, which a command line would show. When the input ends, the supervisor is gone.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import BaseModel, ConfigDict

from api.logs import configure_logging
from api.serving import hold_hangups, loop_factory
from api.settings import Settings, keep_tokenizers_single_threaded
from api.siblings import ENGINES, Siblings
from backends.errors import BackendError
from billing.errors import BillingError
from tenancy.errors import TenancyError

BILLING: Final = "billing"
_STDIN: Final = 0

log = structlog.get_logger(__name__)


class Brief(BaseModel):
    """number: of a worker, from 1; 0 for the one that does billing's jobs. listener: the open port's descriptor, of a
    worker alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any]
    number: int
    folder: Path
    listener: int | None = None

    @property
    def name(self) -> str:
        return str(self.number) if self.number else BILLING

    def line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"

    def siblings(self, workers: int) -> Siblings:
        others = [str(number) for number in range(1, workers + 1) if number != self.number]
        return Siblings(self.folder, self.name, others, beside=(BILLING, ENGINES))


def told(settings: Settings) -> dict[str, Any]:
    """The settings as a brief carries them: only what was set, so that what follows from it follows there too."""
    return settings.model_dump(mode="json", by_alias=True, exclude_unset=True)


# Its last argument is set when the supervisor is gone; SIGTERM follows.
Work = Callable[[Brief, Settings, asyncio.Event], Coroutine[Any, Any, None]]


def run_briefed(work: Work) -> None:
    """The main function of a process with a brief; exit code 1 and one sentence if something is in the way."""
    hold_hangups()
    brief = Brief.model_validate_json(_first_line())
    settings = Settings.model_validate(brief.settings)
    keep_tokenizers_single_threaded()
    configure_logging(settings, worker=brief.name)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_while_supervised(work, brief, settings))
    except (OSError, BackendError, BillingError, TenancyError) as error:
        # The supervisor says what becomes of it; a traceback would say nothing more.
        log.error("this worker can't go on", why=str(error))  # noqa: TRY400
        sys.exit(1)


def _first_line() -> bytes:
    """Byte by byte would do; nothing follows it, so that whatever comes is the line."""
    found = b""
    while not found.endswith(b"\n"):
        part = os.read(_STDIN, 1 << 16)
        if not part:
            sys.exit("pagegate: this process is started by `pagegate serve --workers` alone")
        found += part
    return found


async def _while_supervised(work: Work, brief: Brief, settings: Settings) -> None:
    """A supervisor that was killed has nobody who ends us: we end as if it had told us to."""
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(_STDIN, "rb", buffering=0, closefd=False)
    orphaned = asyncio.Event()
    transport, _ = await loop.connect_read_pipe(partial(_Supervision, orphaned), pipe)
    try:
        await work(brief, settings, orphaned)
    finally:
        transport.close()


class _Supervision(asyncio.Protocol):
    """Its input ends when the supervisor does."""

    def __init__(self, orphaned: asyncio.Event) -> None:
        self._orphaned = orphaned

    def eof_received(self) -> None:
        log.warning("the supervisor is gone")
        self._orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)
