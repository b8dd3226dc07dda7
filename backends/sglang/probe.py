"""Reads what a running SGLang server says of itself. Called before it is attached to; attach.py judges the reports."""

from typing import Any

import aiohttp
import orjson

from backends.errors import EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable
from backends.sglang.attach import Reports

_REPORT_BYTES_MAX = 16 << 20


async def read_reports(url: str, session: aiohttp.ClientSession, *, within_s: float) -> Reports:
    """Raises the BackendError family."""
    bound = aiohttp.ClientTimeout(total=within_s)
    return Reports(
        server_info=_object(await _get(f"{url}/server_info", session, bound)),
        loads=_object(await _get(f"{url}/v1/loads?include=core", session, bound)),
        metrics=(await _get(f"{url}/metrics", session, bound, absent=404)).decode(errors="replace"),
    )


async def _get(
    url: str, session: aiohttp.ClientSession, bound: aiohttp.ClientTimeout, *, absent: int | None = None
) -> bytes:
    """absent: the status that stands for an empty report."""
    try:
        async with session.get(url, timeout=bound) as response:
            if response.status == absent:
                return b""
            if response.status != 200:
                raise EngineRefused(f"{url} answered {response.status}", status=response.status)
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > _REPORT_BYTES_MAX:
                    raise EngineBroke(f"{url} answered more than {_REPORT_BYTES_MAX} bytes")
            return bytes(body)
    except (aiohttp.ClientError, ConnectionError) as error:
        raise EngineUnreachable(f"no answer from {url}: {type(error).__name__}") from error
    except TimeoutError as error:
        raise EngineTimeout(f"{url} did not answer in time") from error


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineBroke("the engine's report is not JSON") from error
    if not isinstance(fields, dict):
        raise EngineBroke("the engine's report is not a JSON object")
    return fields
