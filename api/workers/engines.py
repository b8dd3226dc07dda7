"""The engines that a supervisor starts for its workers: the embedded one, or those that a deployment file launches.

Workers attach to them, so that a worker that dies takes no engine with it.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from api.embedded import embedded_deployment
from api.embedding_model import embedding_folder
from api.launched import launched_units, units_elsewhere
from api.lifecycle import open_keeper, unit_store, utc_now
from api.settings import Settings
from api.unit_news import UnitReader, answer_worker
from api.worker_metrics import counted
from backends.connections import EngineSession
from backends.drivers.processes import Ports
from backends.drivers.switches import Switches
from backends.topology import Deployment, DeploymentInvalid, read_deployment
from billing.jobs import repeat
from gateway.lifecycle.metrics import Starts
from gateway.lifecycle.start_times import StartTimes
from gateway.lifecycle.watch import Watch
from gateway.rollouts.store import read_standings
from gateway.rollouts.trials import losers_of, without_losers
from tenancy.database import Database
from tenancy.errors import TenancyUnavailable


class WorkersEngines:
    """`run` as a task. settings: the operator's. place: of these engines, which this process owns. Workers read in SQL
    how they stand.

    Raises DeploymentInvalid if there is a file that can't be used.
    """

    def __init__(self, settings: Settings, session: EngineSession, database: Database, place: str) -> None:
        self._settings = settings
        self._session = session
        self._place = place
        self._ports = Ports()
        self._switches = Switches()
        self._registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self._registry)
        self.units = unit_store(settings, database)
        self._reader = UnitReader(self.units, database.call, place)
        self._watch = Watch(self._reader.read, heard=lambda _: None, lost=lambda _: None)
        self.news = partial(answer_worker, self._watch)
        self._keeper = open_keeper(
            settings,
            database,
            self.units,
            StartTimes(database),
            place=place,
            heard=self._watch.hear,
            started=Starts(self._registry),
        )
        self._database = database
        self._losers: dict[str, str | None] = {}  # revisions that serve nobody any more, by model
        if settings.deployment is None:
            self._deployment = embedded_deployment(settings)
        else:
            self._deployment = read_deployment(settings.deployment)
        self._take(self._deployment)

    @property
    def first_model(self) -> str:
        return self._deployment.models[0].id

    def workers_settings(self) -> Settings:
        """The operator's settings as workers follow them: attached to the embedded engine, if we start it."""
        settings, backends = self._settings, self._settings.backends
        if settings.deployment is not None or backends.url is not None:
            return settings
        model = self._deployment.models[0]
        url = model.replicas[0].base_url
        embeds = embedding_folder(settings) if backends.embedding_url is None else None
        attached = {"url": url, "checkpoint": model.tokenizer}
        if embeds is not None:
            attached |= {"embedding_url": url, "embedding_checkpoint": embeds}
        return settings.model_copy(update={"backends": backends.model_copy(update=attached)})

    async def counted(self, _words: dict[str, Any]) -> list[list[Any]]:
        """Their starts, for whoever collects what all processes have counted."""
        return counted(self._registry)

    async def run(self) -> None:
        with suppress(TenancyUnavailable):  # it is asked again
            await self._follow_rollouts()
        interval_s = self._settings.gateway.rollout_interval_s
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keeper.run(), name="keep units")
                group.create_task(self._watch.run(self._settings.lifecycle.poll_interval_s), name="watch units")
                group.create_task(repeat("follow rollouts", self._follow_rollouts, interval_s), name="follow rollouts")
        finally:
            await self._switches.close()

    async def reload(self) -> None:
        """As each worker does: a file that can't be used changes nothing. They say why, so this does not."""
        if self._settings.deployment is None:
            return
        try:
            self._take(await asyncio.to_thread(read_deployment, self._settings.deployment))
        except DeploymentInvalid:
            return

    async def _follow_rollouts(self) -> None:
        """Engines of a revision that has lost end what runs there, and leave."""
        if all(model.rollout is None for model in self._deployment.models):
            return
        standings = await self._database.call(read_standings, self._database)
        losers = losers_of(self._deployment, standings)
        if losers != self._losers:
            await asyncio.sleep(2 * self._settings.gateway.rollout_interval_s)  # workers send nothing there by then
            self._losers = losers
            self._take(self._deployment)

    def _take(self, file: Deployment) -> None:
        self._deployment = file
        deployment = without_losers(file, self._losers)
        self._reader.elsewhere = units_elsewhere(deployment, self._settings.region)
        self._keeper.rooms.serve(deployment)
        self._keeper.want(
            launched_units(
                deployment,
                self._settings,
                self._session,
                self._ports,
                self._switches,
                place=self._place,
                at=utc_now(),
            )
        )
