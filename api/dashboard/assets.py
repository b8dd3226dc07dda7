"""The dashboard's static files, held in memory: our own, and those that deploy/setup/web.sh fetched, if it could.

A page names a file with a hash of its content, so that browsers may keep it for ever and never show a stale one.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
# Without them no script runs; the font alone is only a matter of looks.
_NEEDED: Final = ("vendor/htmx.min.js", "vendor/hx-sse.min.js", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    media_type: str
    etag: str


class Assets:
    def __init__(self) -> None:
        self._assets = {
            str(path.relative_to(_STATIC)): _asset(path)
            for path in sorted(_STATIC.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        }
        self.missing = tuple(name for name in _NEEDED if name not in self._assets)

    def has(self, name: str) -> bool:
        return name in self._assets

    def url(self, name: str) -> str:
        """Of a file that is there."""
        return f"/dashboard/static/{name}?v={self._assets[name].etag}"

    async def serve(self, request: Request) -> Response:
        asset = self._assets.get(request.path_params["name"])
        if asset is None:
            return Response("There is no such file.", 404, media_type="text/plain")
        headers = {"etag": f'"{asset.etag}"', "x-content-type-options": "nosniff"}
        current = request.query_params.get("v") == asset.etag
        headers["cache-control"] = "public, max-age=31536000, immutable" if current else "no-cache"
        return Response(asset.content, media_type=asset.media_type, headers=headers)


@cache
def read_assets() -> Assets:
    """What lay there at the first call: read once a process, however many applications it makes."""
    return Assets()


def _asset(path: Path) -> _Asset:
    content = path.read_bytes()
    return _Asset(content, _TYPES[path.suffix], hashlib.sha256(content).hexdigest()[:16])
