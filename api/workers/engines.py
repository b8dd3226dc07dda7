"""The engines that a supervisor starts for its workers: the embedded one, or those that a deployment file launches.

Workers attach to them, so that a worker that dies takes no engine with it.
"""

import asyncio

from prometheus_client import CollectorRegistry

from api.embedding_model import embedding_folder
from api.launched import launched_units
from api.lifecycle import open_keeper, unit_store, utc_now
from api.settings import Settings
from api.wiring import embedded_deployment
from backends.connections import EngineSession
from backends.drivers.processes import Ports
from backends.drivers.switches import Switches
from backends.topology import Deployment, DeploymentInvalid, read_deployment
from gateway.lifecycle.metrics import Starts
from gateway.lifecycle.start_times import StartTimes
from tenancy.database import Database


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
        self.registry = CollectorRegistry(auto_describe=True)
        self._keeper = open_keeper(
            settings,
            database,
            unit_store(settings, database),
            StartTimes(database),
            place=place,
            heard=lambda _: None,
            started=Starts(self.registry),
        )
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

    async def run(self) -> None:
        try:
            await self._keeper.run()
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

    def _take(self, deployment: Deployment) -> None:
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
