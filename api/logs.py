"""How a process of ours writes log lines: one renderer for ours and the standard library's. Set once, at its start."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, TextIO, cast

import orjson
import structlog

from api.settings import Settings


class _Losable:
    """A file for log lines. On a full disk, or in a pipe that nobody reads any more, a line is lost: otherwise it would
    end the request that it is about, or the loop that says it, and with that the service.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, line: Any) -> int:
        with suppress(OSError):
            self._file.write(line)
        return len(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


def configure_logging(settings: Settings, *, worker: str | None = None) -> None:
    """Send our own lines and the standard library's (uvicorn, asyncio) through one renderer.

    worker: which of several processes writes them; each of its lines says so.
    """
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if worker is not None:
        shared.insert(0, partial(_name_worker, worker))
    renderer: structlog.typing.Processor
    if settings.log_format == "json":
        renderer = structlog.processors.JSONRenderer(serializer=lambda value, **_: _json_bytes(value).decode())
        line: structlog.typing.Processor = structlog.processors.JSONRenderer(serializer=_json_bytes)
        factory: Callable[..., structlog.typing.WrappedLogger] = structlog.BytesLoggerFactory(
            cast("BinaryIO", _Losable(sys.stderr.buffer))
        )
    else:
        renderer = line = structlog.dev.ConsoleRenderer(colors=False)
        factory = structlog.PrintLoggerFactory(cast("TextIO", _Losable(sys.stderr)))
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, line],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                # As text here: a renderer for the console would draw it with the values of locals, prompts among them.
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)


def _json_bytes(value: Any, **_: Any) -> bytes:
    """Bytes, since each request's line goes out as they are, in one write."""
    return orjson.dumps(value, default=str)


def _name_worker(
    worker: str, _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    event.setdefault("worker", worker)
    return event
