"""What runs in a process so that several share pages, and heed each other's deeds at once. Called by wiring.py."""

import asyncio
import secrets
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from api.settings import Settings
from gateway.fleet import Fleet
from gateway.sharing.metrics import SharingCollector
from gateway.sharing.sharer import Sharer
from tenancy.database import Database
from tenancy.deeds import DeedWatch


async def open_sharing(
    settings: Settings, fleet: Fleet, registry: CollectorRegistry, stack: AsyncExitStack
) -> list[Coroutine[Any, Any, None]]:
    """What runs so that several gateways never plan with the same pages; nothing for one alone."""
    if not settings.pages_url:
        return []
    from gateway.sharing.redis import RedisBoard, open_calls  # noqa: PLC0415 - its client comes with the extra `shared` alone
    from tenancy.meters.servers import listen  # noqa: PLC0415

    calls = await stack.enter_async_context(open_calls(settings.pages_url, timeout_s=settings.gateway.pages_timeout_s))
    lease_s = settings.gateway.pages_lease_s
    board_of = partial(RedisBoard, calls, lease_s=lease_s)
    sharer = Sharer(
        fleet,
        board_of,
        process=secrets.token_hex(8),
        processes=settings.sharers,
        lease_s=lease_s,
    )
    stack.push_async_callback(sharer.close)
    registry.register(SharingCollector(sharer))

    def boards() -> list[RedisBoard]:
        """Of the models that are served now: a deployment may bring some."""
        return [board_of(served.model) for served in fleet.all()]

    return [
        sharer.run(),
        listen(settings.pages_url, lambda: (board.channel for board in boards()), sharer.poke),
        listen(settings.pages_url, lambda: (board.reports_channel for board in boards()), sharer.told),
    ]


def deed_news(settings: Settings, database: Database, watch: DeedWatch) -> list[Coroutine[Any, Any, None]]:
    """What is done here is heeded at once, and told to other processes where they share meters."""
    loop = asyncio.get_running_loop()
    database.after_deed = partial(loop.call_soon_threadsafe, watch.poke)
    if not settings.meters_url:
        return []
    from tenancy.deed_news import CHANNEL, DeedNews  # noqa: PLC0415 - its client comes with the extra `shared` alone
    from tenancy.meters.servers import listen  # noqa: PLC0415

    news = DeedNews(settings.meters_url)

    def done() -> None:
        watch.poke()
        news.poke()

    database.after_deed = partial(loop.call_soon_threadsafe, done)
    return [news.run(), listen(settings.meters_url, lambda: [CHANNEL], watch.poke)]
