"""What a gateway costs that does nothing: FastAPI in front, aiohttp behind, one constant key, no tokens counted.

Started by gateway_cost.py as a process of its own; the unit in which the gateway's own cost is expressed.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Header, HTTPException, Response
from fastapi.responses import StreamingResponse


def build_app(engine_url: str, key: str) -> FastAPI:
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            sessions.append(session)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any], authorization: Annotated[str, Header()] = "") -> Response:
        if authorization != f"Bearer {key}":
            raise HTTPException(401)
        upstream = await sessions[0].post(engine_url + "/v1/chat/completions", json=body)
        content_type = upstream.headers["content-type"]
        if not body.get("stream"):
            return Response(await upstream.read(), upstream.status, media_type=content_type)

        async def relay() -> AsyncIterator[bytes]:
            async with upstream:
                async for data in upstream.content.iter_any():
                    yield data

        return StreamingResponse(relay(), upstream.status, media_type=content_type)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--key", required=True)
    options = parser.parse_args()
    uvicorn.run(
        build_app(options.engine, options.key),
        host="127.0.0.1",
        port=options.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
