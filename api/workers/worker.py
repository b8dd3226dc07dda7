"""One worker: `python -m api.workers.worker`, started by supervisor.py. It serves the port that it was handed, beside
others who accept from the same queue, so that a worker that ends takes no waiting connection with it.
"""

import socket

from api.services import Services
from api.serving import serve_on
from api.settings import Settings
from api.siblings import answering
from api.wiring import open_services
from api.workers.answers import answers_of
from api.workers.brief import Brief, run_briefed


async def _serve(brief: Brief, settings: Settings) -> None:
    with socket.socket(fileno=brief.listener) as listener:
        siblings = brief.siblings(settings.workers)
        async with open_services(settings, worker=brief.number, siblings=siblings) as services:
            await _serve_and_answer(brief, listener, services)


async def _serve_and_answer(brief: Brief, listener: socket.socket, services: Services) -> None:
    async with answering(brief.folder, brief.name, answers_of(services)):
        await serve_on(listener, services)


if __name__ == "__main__":
    run_briefed(_serve)
