"""A stand-in for Kubernetes' API server: the `scale` subresource of workloads, and a record of what was asked."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from lightkube import AsyncClient, KubeConfig
from lightkube.config.models import Cluster, User

TOKEN = "service-account-token"


@dataclass
class Asked:
    verb: str
    path: str
    content_type: str
    authorization: str
    body: Any


@dataclass
class StandIn:
    """wished: replicas by path. lingering: looks for which a pod still counts after its workload was scaled to 0."""

    wished: dict[str, int]
    lingering: int = 0
    asked: list[Asked] = field(default_factory=list)
    refuses: int | None = None

    async def scale(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        asked = Asked(
            request.method, request.path, request.content_type, request.headers.get("Authorization", ""), body
        )
        self.asked.append(asked)
        if self.refuses is not None:
            return _failure(self.refuses, "not yours")
        if request.path not in self.wished:
            return _failure(404, "not found")
        if request.method == "PATCH":
            assert body is not None, "a patch says what to change"
            self.wished[request.path] = body["spec"]["replicas"]
        wished = self.wished[request.path]
        pods = wished
        if not wished and self.lingering:
            self.lingering, pods = self.lingering - (request.method == "GET"), 1
        return _answer(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {"name": request.match_info["name"], "namespace": request.match_info["namespace"]},
                "spec": {"replicas": wished},
                "status": {"replicas": pods},
            }
        )


def _answer(document: dict[str, Any], status: int = 200) -> web.Response:
    """Without a charset, as the API server's."""
    headers = {"Content-Type": "application/json"}
    return web.Response(body=json.dumps(document).encode(), status=status, headers=headers)


def _failure(status: int, message: str) -> web.Response:
    said = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return _answer(said | {"message": message, "code": status}, status)


@asynccontextmanager
async def cluster(stand_in: StandIn) -> AsyncIterator[AsyncClient]:
    """Its client, with a token and the namespace `pagegate`."""
    app = web.Application()
    app.router.add_route("*", "/apis/apps/v1/namespaces/{namespace}/{kind}/{name}/scale", stand_in.scale)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    client = client_of(f"http://{host}:{port}")
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def client_of(url: str) -> AsyncClient:
    return AsyncClient(
        config=KubeConfig.from_one(cluster=Cluster(server=url), user=User(token=TOKEN), namespace="pagegate")
    )
