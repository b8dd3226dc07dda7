"""What the one engine client makes of engines that differ."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from backends.client import EngineClient
from backends.connections import open_session
from backends.errors import EngineRefused
from backends.settings import BackendSettings


@pytest.mark.parametrize("status", [200, 503])
async def test_an_engine_without_a_route_for_readiness_is_asked_for_its_health(status: int) -> None:
    async def health(request: web.Request) -> web.Response:
        del request
        return web.Response(status=status)

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server, open_session() as session:
        client = EngineClient(str(server.make_url("")).rstrip("/"), session, BackendSettings())
        if status == 200:
            await client.ready()
        else:
            with pytest.raises(EngineRefused):
                await client.ready()
