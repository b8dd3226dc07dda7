"""Reads what a running SGLang server says of itself. Called before it is attached to; attach.py judges the reports."""

from typing import Any

import orjson

from backends.connections import EnginePool, open_session
from backends.errors import EngineBroke, EngineRefused
from backends.sglang.attach import Reports


async def read_reports(url: str, *, within_s: float) -> Reports:
    """within_s: for each report. Raises the BackendError family."""
    async with open_session() as session:
        pool = session.pool(url)
        return Reports(
            server_info=_object(await _get(pool, "/server_info", within_s)),
            loads=_object(await _get(pool, "/v1/loads?include=core", within_s)),
            metrics=(await _get(pool, "/metrics", within_s, absent=404)).decode(errors="replace"),
        )


async def _get(pool: EnginePool, path: str, within_s: float, *, absent: int | None = None) -> bytes:
    """absent: the status that stands for an empty report."""
    status, body = await pool.exchange(pool.request("GET", path), within_s=within_s, connect_s=within_s)
    if status == absent:
        return b""
    if status != 200:
        raise EngineRefused(f"{path} answered {status}", status=status)
    return body


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineBroke("the engine's report is not JSON") from error
    if not isinstance(fields, dict):
        raise EngineBroke("the engine's report is not a JSON object")
    return fields
