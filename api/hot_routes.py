"""The generating routes, reached past the framework's layers: the same endpoints, found by the same patterns.

FastAPI's stack (error handling, telemetry, exit stacks, routing) costs a fifth of what a short request costs here and
serves these routes nothing: they read their bodies themselves and have one place for errors. FastAPI keeps the routes
for OpenAPI, and serves every request that is not one of theirs.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from re import Pattern

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.departure import ClientGone
from api.refusals import FORESEEN, refusal

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class HotRoute:
    """A POST route. pattern: matches whole paths; its named groups are the path's parameters. path: its template."""

    path: str
    pattern: Pattern[str]
    endpoint: Endpoint


class HotRoutes:
    """Tries the hot routes in order, then the application, which also refuses other methods on their paths.

    hot: serves a matched request (serve_hot inside the outermost layer). app: everything else.
    """

    def __init__(self, app: ASGIApp, hot: ASGIApp, routes: Sequence[HotRoute]) -> None:
        self._app = app
        self._hot = hot
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            for route in self._routes:
                found = route.pattern.match(scope["path"])
                if found is not None:
                    scope["path_params"] = found.groupdict()
                    scope["route"] = route
                    await self._hot(scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def serve_hot(scope: Scope, receive: Receive, send: Send) -> None:
    """The endpoint of the route in `scope`, with foreseen errors answered in its dialect."""
    request = Request(scope, receive, send)
    try:
        response = await scope["route"].endpoint(request)
    except FORESEEN as error:
        response = refusal(request, error)
    except ClientGone:
        response = Response(status_code=499)  # for the access log alone: the client has left
    await response(scope, receive, send)
