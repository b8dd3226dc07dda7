"""Cloudflare's envelope around every good answer that is not a stream. Refusals are api/refusals.py's."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def enveloped(
    result: Any,
    *,
    messages: list[dict[str, Any]] | None = None,
    result_info: dict[str, int] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body: dict[str, Any] = {"result": result, "success": True, "errors": [], "messages": messages or []}
    if result_info is not None:
        body["result_info"] = result_info
    return Response(orjson.dumps(body), headers=headers, media_type="application/json")
