"""One worker: `python -m api.workers.worker`, started by supervisor.py. It serves the port that it was handed, beside
others who accept from the same queue, so that a worker that ends takes no waiting connection with it.
"""

import asyncio
import socket

from api.services import Services
from api.serving import serve_on
from api.settings import Settings
from api.siblings import answering
from api.wiring import open_services
from api.workers.answers import answers_of
from api.workers.brief import Brief, run_briefed


async def _serve(brief: Brief, settings: Settings, orphaned: asyncio.Event) -> None:
    assert brief.listener is not None, "a worker's brief names it"
    with socket.socket(fileno=brief.listener) as listener:
        siblings = brief.siblings(settings.workers)
        async with open_services(settings, worker=brief.number, siblings=siblings) as services:
            await _serve_and_answer(brief, listener, services, orphaned)


async def _serve_and_answer(brief: Brief, listener: socket.socket, services: Services, orphaned: asyncio.Event) -> None:
    async with answering(brief.folder, brief.name, answers_of(services)):
        await serve_on(listener, services, orphaned)


if __name__ == "__main__":
    run_briefed(_serve)
