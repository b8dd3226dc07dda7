"""The composition root of an API process: settings in, Services out, everything closed in reverse order.

Only this file, and what it opens with (recording.py, sharing.py, embedded.py), names concrete stores, meters, boards
and engines. Whatever runs in the background is a task of the one group here, so that a task that dies ends the process
instead of being missed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from api.batching import open_batching
from api.deployed import Deployed
from api.embedded import awake_at, embedded_deployment, embedding_url
from api.embedding_model import embedding_card, embedding_folder
from api.health import READY
from api.lifecycle import Lifecycle
from api.place import own_place, place_of
from api.recording import billing_jobs, open_metering
from api.resting import open_resting
from api.scaling import open_scaler
from api.services import Services
from api.settings import Settings
from api.sharing import deed_news, open_sharing
from api.siblings import ALONE, Siblings
from api.unit_news import ask_supervisor
from backends.client import EngineClient
from backends.connections import open_session
from backends.topology import read_deployment
from billing.alerts import Exhausted
from billing.budgets import Budgets
from billing.credit.process import ProcessCredit
from billing.credit.protocol import Credit
from billing.errors import BillingUnavailable
from billing.jobs import open_kept_answers, repeat
from billing.ledger.wallet import Wallets
from billing.metrics import CreditCollector, SpoolCollector
from billing.price_book import PriceBook
from billing.spool import Spool
from billing.store import UsageStore
from billing.webhooks.endpoints import Endpoints
from gateway.batches.metrics import BatchCollector
from gateway.cache_scope import CacheScopes
from gateway.conversations import Conversations
from gateway.embedding import Embeddings
from gateway.fleet import Fleet
from gateway.hold import Holds
from gateway.metrics import CapacityCollector, GatewayMetrics
from gateway.pipeline import Parts, Pipeline
from gateway.rollouts.metrics import RolloutCollector
from gateway.rollouts.trials import Trials
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
        place = stack.enter_context(own_place(settings.home)) if alone else place_of(settings.home)
        database = open_database(settings.database_url, busy_timeout_s=settings.tenancy.database_busy_timeout_s)
        stack.callback(database.close)
        price_book = PriceBook(database)
        await price_book.refresh()
        exhausted = Exhausted(database, clock=time.time_ns)
        metering, spool, shared_credit = await open_metering(
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
        sharing = await open_sharing(settings, fleet, registry, stack)
        scopes = CacheScopes(open_pepper(settings.pepper_path))
        embeddings = None
        if encoder is not None:
            url = embedding_url(settings, deployment)
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
                awake=awake_at(url, settings, deployment, lifecycle),
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
            if deeds:
                with suppress(BillingUnavailable):  # then it is noticed by the second
                    await credit.refresh()
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
            account_bytes_max=settings.gateway.responses_kept_bytes_per_account_max,
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
                *deed_news(settings, database, watch),
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
