"""The composition root of an API process: settings in, Services out, everything closed in reverse order.

Only this file names concrete stores, meters and engines. Whatever runs in the background is a task of the one group
here, so that a task that dies ends the process instead of being missed.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from api.batching import open_batching
from api.deployed import Deployed
from api.embedding_model import embedding_card, embedding_folder
from api.health import READY
from api.lifecycle import Lifecycle
from api.place import own_place, place_of
from api.resting import open_resting
from api.scaling import open_scaler
from api.services import Services
from api.settings import EMBEDDED_ENGINE, SPOOL_OF_WORKER, Settings
from api.siblings import ALONE, Siblings
from api.unit_news import ask_supervisor
from backends.checkpoints import DEFAULT_CHECKPOINT, checkpoint_path
from backends.client import EngineClient
from backends.connections import open_session
from backends.engine_tables import Launch
from backends.local_command import embedded_launch
from backends.supervision import free_port
from backends.topology import Deployment, read_deployment
from billing.alerts import Exhausted
from billing.budgets import Budgets
from billing.credit.process import ProcessCredit
from billing.credit.protocol import Credit
from billing.credit.shared import SharedCredit
from billing.errors import BillingUnavailable
from billing.former_spools import FormerSpools
from billing.jobs import BillingJobs, open_kept_answers, repeat
from billing.ledger.wallet import Wallets
from billing.metering import Metering
from billing.metrics import CreditCollector, SpoolCollector
from billing.price_book import PriceBook
from billing.spool import Spool
from billing.store import UsageStore
from billing.webhooks.endpoints import Endpoints
from gateway.batches.metrics import BatchCollector
from gateway.batches.store import leave_to_anybody
from gateway.cache_scope import CacheScopes
from gateway.conversations import Conversations
from gateway.embedding import Embeddings
from gateway.fleet import Fleet
from gateway.hold import Holds
from gateway.metrics import CapacityCollector, GatewayMetrics
from gateway.pipeline import Parts, Pipeline
from gateway.rollouts.metrics import RolloutCollector
from gateway.rollouts.trials import Trials
from gateway.sharing.metrics import SharingCollector
from gateway.sharing.sharer import Sharer
from tenancy.authenticate import Authenticator
from tenancy.database import Database, open_database
from tenancy.deeds import Deeds, DeedWatch
from tenancy.meters.metrics import MetersCollector
from tenancy.meters.process import ProcessMeters
from tenancy.meters.protocol import Meters
from tenancy.metrics import DatabaseCollector
from tenancy.model_switches import disabled_model_ids
from tenancy.passwords import Passwords
from tenancy.pepper import open_pepper
from tenancy.sign_in import SignIns

if TYPE_CHECKING:
    from tenancy.meters.redis import RedisMeters

log = structlog.get_logger(__name__)

_ENGINE_HOST = "127.0.0.1"
_TELL_INTERVAL_S = 1.0
_SWEEP_INTERVAL_S = 60.0


@asynccontextmanager
async def open_services(settings: Settings, *, worker: int = 1, siblings: Siblings = ALONE) -> AsyncIterator[Services]:
    """Everything one API process needs. The schema must be current and the checkpoint in place (`pagegate serve` sees
    to both). Raises OSError or ValueError if a folder or file of the data folder can't be used.

    worker, siblings: its number among the workers of a gateway. One that has siblings leaves engines and billing's
    jobs to its supervisor.
    """
    alone = siblings is ALONE
    async with AsyncExitStack() as stack:
        database = open_database(settings.database_url, busy_timeout_s=settings.tenancy.database_busy_timeout_s)
        stack.callback(database.close)
        price_book = PriceBook(database)
        await price_book.refresh()
        exhausted = Exhausted(database, clock=time.time_ns)
        metering, spool, shared_credit = await _open_metering(
            settings, database, price_book, exhausted, stack, worker=worker
        )
        credit: Credit = shared_credit or ProcessCredit(database, metering.flush, exhausted.note)

        session = open_session()
        stack.push_async_callback(session.close)
        threads = ThreadPoolExecutor(settings.gateway.tokenise_threads, thread_name_prefix="tokenise")
        stack.callback(threads.shutdown, cancel_futures=True)
        encoder = embedding_folder(settings)
        encoders = [] if encoder is None else [embedding_card(settings.embedding_model_id, encoder)]
        registry = CollectorRegistry(auto_describe=True)
        place = stack.enter_context(own_place(settings.home)) if alone else place_of(settings.home)
        lifecycle = Lifecycle(
            settings,
            database,
            session,
            registry,
            place=place,
            keeps=alone,
            supervisor=None if alone else ask_supervisor(siblings),
        )
        trials = Trials(database)
        deployed = Deployed(
            settings,
            session,
            threads,
            lifecycle,
            vetted=settings.deployment is not None,
            trials=trials,
            beside=encoders,
        )
        if settings.deployment is None:
            deployment = embedded_deployment(settings)
        else:
            deployment = read_deployment(settings.deployment)
        await deployed.take(deployment)
        fleet = deployed.fleet

        authenticator = _authenticator(settings, database)
        stack.push_async_callback(authenticator.close)
        passwords = Passwords()
        stack.callback(passwords.close)
        webhooks = Endpoints(database, allowed=settings.billing.webhook_addresses(), clock=time.time_ns)
        wallets = Wallets(database, clock=time.time_ns)
        kept_answers = open_kept_answers(database, settings.billing, process=spool.owner, clock=time.time_ns)
        # What a killed process was answering will not be answered any more.
        await database.call(partial(kept_answers.end_abandoned, everybodys=shared_credit is None))
        meters, shared_meters = await _open_meters(settings, stack)
        holds = Holds(meters, credit)
        _register(registry, fleet, holds, SpoolCollector(spool, metering))
        if shared_meters:
            registry.register(MetersCollector(shared_meters))
        metrics = GatewayMetrics(registry)
        registry.register(DatabaseCollector(lambda: database.away))
        registry.register(RolloutCollector(trials))
        sharing = await _open_sharing(settings, fleet, registry, stack)
        scopes = CacheScopes(open_pepper(settings.pepper_path))
        embeddings = None
        if encoder is not None:
            url = _embedding_url(settings, deployment)
            embeddings = Embeddings(
                EngineClient(url, session, settings.backends),
                encoder,
                threads,
                catalogue=deployed.catalogue,
                holds=holds,
                metering=metering,
                price_book=price_book,
                metrics=metrics,
                region=settings.backends.embedding_region or settings.region,
                awake=_awake_at(url, settings, deployment, lifecycle),
            )
            stack.push_async_callback(embeddings.drain, within_s=settings.gateway.abort_wait_s)
        pipeline = Pipeline(
            Parts(
                deployed.catalogue,
                deployed.prompts,
                fleet,
                holds,
                metering,
                price_book,
                scopes,
                metrics,
                settings.gateway,
                lifecycle.waking,
            )
        )

        async def heed(deeds: Deeds) -> None:
            authenticator.heed(deeds)
            if deeds.service:
                deployed.catalogue.disabled = await database.call(disabled_model_ids, database)

        watch = DeedWatch(database, heed, interval_s=settings.tenancy.deeds_interval_s, clock=time.time_ns)
        await watch.look()
        # Lines of batches run until the end; what they were doing ends while it can still be recorded.
        stack.push_async_callback(pipeline.drain, within_s=0)
        batching = open_batching(
            settings,
            database,
            metering,
            spool.owner,
            fleet,
            deployed.catalogue,
            pipeline,
            embeddings,
            wakes=lifecycle.waking.wakes,
        )
        registry.register(BatchCollector(batching.figures))
        conversations = Conversations(
            database,
            clock=time.time_ns,
            kept_s=settings.gateway.response_kept_seconds,
            bytes_max=settings.gateway.response_kept_bytes_max,
            per_account_max=settings.gateway.responses_kept_per_account_max,
        )
        await stack.enter_async_context(
            _background(
                batching.run(),
                repeat("sweep responses", partial(database.call, conversations.sweep), _SWEEP_INTERVAL_S),
                repeat("sweep batches", partial(database.call, batching.sweep), _SWEEP_INTERVAL_S),
                metering.run(),
                fleet.run(),
                repeat("refresh prices", price_book.refresh, settings.billing.price_refresh_interval_s),
                watch.run(),
                *_deed_news(settings, database, watch),
                repeat("follow rollouts", deployed.follow_rollouts, settings.gateway.rollout_interval_s),
                repeat("refresh funds", credit.refresh, settings.billing.funds_refresh_interval_s),
                repeat("tell of budgets", partial(database.call, exhausted.tell), _TELL_INTERVAL_S),
                *([billing_jobs(settings, database).run()] if alone else []),
                repeat("note keys' uses", authenticator.note_uses, settings.tenancy.key_use_interval_s),
                *([shared_meters.run()] if shared_meters else []),
                *([shared_credit.run()] if shared_credit else []),
                *sharing,
                lifecycle.run(),
                open_scaler(settings, database, lifecycle, fleet, registry).run(),
                open_resting(settings, database, lifecycle, fleet).run(),
            )
        )
        yield Services(
            settings=settings,
            database=database,
            authenticator=authenticator,
            catalogue=deployed.catalogue,
            trials=trials,
            sign_ins=SignIns(database, passwords, clock=time.time_ns),
            pipeline=pipeline,
            embeddings=embeddings,
            batching=batching,
            holds=holds,
            fleet=fleet,
            metering=metering,
            usage=UsageStore(database),
            wallets=wallets,
            webhooks=webhooks,
            kept_answers=kept_answers,
            conversations=conversations,
            budgets=Budgets(database, clock=time.time_ns),
            price_book=price_book,
            registry=registry,
            ready=lambda: _ready(fleet, lifecycle, spool, database),
            reload=deployed.reload,
            lifecycle=lifecycle,
            siblings=siblings,
        )


async def _open_metering(
    settings: Settings,
    database: Database,
    price_book: PriceBook,
    exhausted: Exhausted,
    stack: AsyncExitStack,
    *,
    worker: int,
) -> tuple[Metering, Spool, SharedCredit | None]:
    """The durable record, with what a killed process left in it settled first; and credit, where others share it."""
    spool = Spool(
        settings.spool_dir(worker),
        segment_bytes_max=settings.billing.spool_segment_bytes_max,
        high_water_bytes=settings.billing.spool_high_water_bytes,
    )
    stack.callback(spool.close)
    # Whoever shares meters shares accounts, and so their money.
    credit = SharedCredit(database, spool.owner, note_exhausted=exhausted.note) if settings.meters_url else None
    metering = Metering(
        spool,
        database,
        price_book,
        clock=time.time_ns,
        drain_interval_s=settings.billing.drain_interval_s,
        drain_batch_records_max=settings.billing.drain_batch_records_max,
        allowances=credit,
    )
    await metering.recover()
    if credit is not None:
        await metering.flush()
        await credit.open()
        stack.push_async_callback(_leave, metering, credit)
    return metering, spool, credit


def billing_jobs(settings: Settings, database: Database) -> BillingJobs:
    """What one process does for all workers of this data folder."""
    mine = {settings.spool_dir(number) for number in range(1, settings.workers + 1)}
    former = FormerSpools(
        lambda: [path for path in settings.home.glob(f"{SPOOL_OF_WORKER}*") if path not in mine],
        database,
        settings.billing,
        of_now=mine,
        free=leave_to_anybody,
    )
    return BillingJobs(database, settings.billing, former)


async def _leave(metering: Metering, credit: SharedCredit) -> None:
    """What this process did not use is there for the others at once, and not only when its lease ends."""
    with suppress(BillingUnavailable):
        await metering.flush()
    await credit.close()


async def _open_meters(settings: Settings, stack: AsyncExitStack) -> tuple[Meters, "RedisMeters | None"]:
    """Meters in this process, or shared ones: twice, since those also run in the background and have metrics."""
    if not settings.meters_url:
        return ProcessMeters(), None
    from tenancy.meters.redis import RedisMeters  # noqa: PLC0415 - its client comes with the extra `shared` alone

    meters = RedisMeters(
        settings.meters_url,
        processes=settings.sharers,
        timeout_s=settings.tenancy.meters_timeout_s,
        lease_s=settings.tenancy.meters_lease_s,
        probe_interval_s=settings.tenancy.meters_probe_interval_s,
    )
    await meters.open()
    stack.push_async_callback(meters.close)
    return meters, meters


async def _open_sharing(
    settings: Settings, fleet: Fleet, registry: CollectorRegistry, stack: AsyncExitStack
) -> list[Coroutine[Any, Any, None]]:
    """What runs so that several gateways never plan with the same pages; nothing for one alone."""
    if not settings.pages_url:
        return []
    from gateway.sharing.redis import RedisBoard, open_calls  # noqa: PLC0415 - as the meters' client
    from tenancy.meters.servers import listen  # noqa: PLC0415

    calls = await stack.enter_async_context(open_calls(settings.pages_url, timeout_s=settings.gateway.pages_timeout_s))
    lease_s = settings.gateway.pages_lease_s
    sharer = Sharer(
        fleet,
        lambda model: RedisBoard(calls, model, lease_s=lease_s),
        process=secrets.token_hex(8),
        processes=settings.sharers,
        lease_s=lease_s,
    )
    stack.push_async_callback(sharer.close)
    registry.register(SharingCollector(sharer))
    boards = [RedisBoard(calls, served.model, lease_s=lease_s) for served in fleet.all()]
    return [
        sharer.run(),
        listen(settings.pages_url, [board.channel for board in boards], sharer.poke),
        listen(settings.pages_url, [board.reports_channel for board in boards], sharer.told),
    ]


def _deed_news(settings: Settings, database: Database, watch: DeedWatch) -> list[Coroutine[Any, Any, None]]:
    """What is done here is heeded at once, and told to other processes where they share meters."""
    loop = asyncio.get_running_loop()
    database.after_deed = partial(loop.call_soon_threadsafe, watch.poke)
    if not settings.meters_url:
        return []
    from tenancy.deed_news import CHANNEL, DeedNews  # noqa: PLC0415 - as the meters' client
    from tenancy.meters.servers import listen  # noqa: PLC0415

    news = DeedNews(settings.meters_url)

    def done() -> None:
        watch.poke()
        news.poke()

    database.after_deed = partial(loop.call_soon_threadsafe, done)
    return [news.run(), listen(settings.meters_url, [CHANNEL], watch.poke)]


def _authenticator(settings: Settings, database: Database) -> Authenticator:
    return Authenticator(
        database,
        open_pepper(settings.pepper_path),
        ttl_s=settings.tenancy.key_cache_ttl_s,
        watched_s=settings.tenancy.key_cache_watched_s_max,
        negative_ttl_s=settings.tenancy.unknown_key_cache_ttl_s,
        stale_s=settings.tenancy.key_cache_stale_s_max,
        max_entries=settings.tenancy.key_cache_entries_max,
    )


def embedded_deployment(settings: Settings) -> Deployment:
    """What is served without a deployment file: one model, on the embedded engine or on one at a URL.

    Its limits are the checkpoint's own. `auto` for the cache is the type of the weights, which are bf16.
    """
    backends = settings.backends
    checkpoint = backends.checkpoint or checkpoint_path(DEFAULT_CHECKPOINT, settings.cache_dir)
    context = int(json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"])
    engine = {
        "name": EMBEDDED_ENGINE,
        "weights": {
            "checkpoint": str(checkpoint),
            "precision": backends.prefill_weights,
            "decode_precision": backends.decode_weights,
        },
        "url": backends.url,
        "launch": None if backends.url else _embedded_launch(settings),
    }
    model = {
        "id": settings.model_id,
        "price": settings.model_id,
        "tokenizer": checkpoint,
        # A prompt has at least one token.
        "limits": {"context_tokens": context, "output_tokens_max": context - 1},
        "kv_cache_dtype": "bf16" if backends.kv_cache_dtype == "auto" else backends.kv_cache_dtype,
        "page_tokens": 16,
        "page_tags": False,
        "replicas": [engine],
    }
    return Deployment.model_validate({"models": [model]})


def _embedded_launch(settings: Settings) -> Launch:
    folder = embedding_folder(settings) if settings.backends.embedding_url is None else None
    encoder = None if folder is None else (folder, settings.embedding_model_id)
    return embedded_launch(
        settings.backends, settings.cache_dir, _ENGINE_HOST, free_port(_ENGINE_HOST), encoder=encoder
    )


def _embedding_url(settings: Settings, deployment: Deployment) -> str:
    """Of the engine that was named for it, else of the embedded one."""
    return settings.backends.embedding_url or deployment.models[0].replicas[0].base_url


def _awake_at(
    url: str, settings: Settings, deployment: Deployment, lifecycle: Lifecycle
) -> Callable[[], Awaitable[None]] | None:
    """An encoder of one of the deployment's engines sleeps with it, and a request for it wakes it. None: it has another
    engine, which nobody here puts to sleep.
    """
    for model in deployment.models:
        for replica in model.replicas:
            if replica.base_url == url:
                return partial(
                    lifecycle.waking.until_awake,
                    model.id,
                    wait_s=settings.gateway.queue_wait_seconds_max,
                    among=(replica.name,),
                    named=settings.embedding_model_id,
                )
    return None


def _register(registry: CollectorRegistry, fleet: Fleet, holds: Holds, spool: SpoolCollector) -> None:
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(CapacityCollector(fleet, holds))
    registry.register(spool)
    registry.register(CreditCollector(holds.credit))


def _ready(fleet: Fleet, lifecycle: Lifecycle, spool: Spool, database: Database) -> tuple[bool, str]:
    """Traffic may come if some engine of each model answers, or is not meant to, and usage can be recorded.

    Without a database as well, by what was allowed before: then the reason says what is amiss.
    """
    down = [model.model for model in fleet.all() if not model.up and not lifecycle.may_sleep(model.model)]
    if down:
        return False, f"no engine answers for {', '.join(down)}"
    if spool.failed:
        return False, "usage can't be recorded"
    return True, "the database does not answer" if database.away else READY


@asynccontextmanager
async def _background(*loops: Awaitable[None]) -> AsyncIterator[None]:
    """Run loops until the block ends. One that dies ends the block with its error."""
    tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_named(loop)) for loop in loops]
            yield
            for task in tasks:
                task.cancel()
    finally:
        for task in tasks:
            task.cancel()


async def _named(loop: Awaitable[None]) -> None:
    await loop
