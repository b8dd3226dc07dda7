"""The frozen bundle that routes receive: what wiring.py opened, under the names routes use."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from api.lifecycle import Lifecycle
from api.settings import Settings
from api.siblings import ALONE, Siblings
from billing.budgets import Budgets
from billing.errors import BillingUnavailable
from billing.kept_answers import KeptAnswers
from billing.ledger.wallet import Wallets
from billing.metering import Metering
from billing.price_book import PriceBook
from billing.store import UsageStore
from billing.webhooks.endpoints import Endpoints
from gateway.batches.desk import Batching
from gateway.catalogue import Catalogue
from gateway.conversations import Conversations
from gateway.embedding import Embeddings
from gateway.fleet import Fleet
from gateway.hold import Holds
from gateway.pipeline import Pipeline
from gateway.rollouts.trials import Trials
from tenancy.authenticate import Authenticator
from tenancy.database import Database
from tenancy.sign_in import SignIns


@dataclass(frozen=True, slots=True)
class Services:
    """One process's services. ready(): may traffic come, and what is amiss. reload(): read the deployment file again.

    siblings: the other workers of this gateway, if there are any.
    """

    settings: Settings
    database: Database
    authenticator: Authenticator
    sign_ins: SignIns
    catalogue: Catalogue
    trials: Trials
    pipeline: Pipeline
    embeddings: Embeddings | None
    batching: Batching
    holds: Holds
    fleet: Fleet
    metering: Metering
    usage: UsageStore
    wallets: Wallets
    webhooks: Endpoints
    kept_answers: KeptAnswers
    conversations: Conversations
    budgets: Budgets
    price_book: PriceBook
    registry: CollectorRegistry
    ready: Callable[[], tuple[bool, str]]
    reload: Callable[[], Coroutine[Any, Any, None]]
    lifecycle: Lifecycle
    siblings: Siblings = ALONE

    async def settled(self) -> None:
        """Return when all that was recorded before is in SQL, whichever worker did so: a client reads its own writes.

        Raises BillingUnavailable. A sibling that does not answer is not waited for.
        """
        await asyncio.gather(self.metering.flush(), self.siblings.ask("flush"))

    async def heeded(self) -> None:
        """Return when this process holds money by what was just done to budgets; else it does within a second."""
        with suppress(BillingUnavailable):
            await self.holds.credit.refresh()
