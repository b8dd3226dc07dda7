"""How a console route answers: JSON, and the headers of what nobody may keep."""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from starlette.responses import Response

NOT_KEPT: Final = {"cache-control": "no-store"}


def json_answer(body: dict[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers=headers, media_type="application/json")
