"""A real receiver over TLS on this machine, that answers as it is told and checks signatures as receivers do."""

import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web
from standardwebhooks import Webhook

from billing.webhooks.addresses import AllowedAddresses

LOOPBACK = AllowedAddresses((ipaddress.ip_network("127.0.0.0/8"),))


@dataclass
class Receiver:
    """status: of its answers. bodies: what came with a right signature, in order; rejected: without one."""

    url: str
    authorities: Path
    secret: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    attempts: int = 0

    async def take(self, request: web.Request) -> web.Response:
        self.attempts += 1
        body = await request.read()
        found = Webhook(self.secret).verify(body, dict(request.headers))
        if self.status == 200:
            self.bodies.append(found)
            self.ids.append(request.headers["webhook-id"])
        return web.Response(status=self.status, headers=self.headers)


@contextlib.asynccontextmanager
async def running_receiver(folder: Path) -> AsyncIterator[Receiver]:
    """folder: where the file of its authority goes."""
    authority = trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_tls)
    authority.cert_pem.write_to_path(str(folder / "authorities.pem"))
    receiver = Receiver("", folder / "authorities.pem")
    app = web.Application()
    app.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
    await site.start()
    receiver.url = f"https://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield receiver
    finally:
        await runner.cleanup()
