"""The engines that a supervisor starts for its workers: the embedded one, or those that a deployment file launches.

Workers attach to them, so that a worker that dies takes no engine with it.
"""

import asyncio
from collections.abc import Iterator

import structlog

from api.embedding_model import embedding_folder
from api.launched import LaunchedEngines
from api.settings import Settings
from api.wiring import embedded_deployment
from backends.client import EngineClient
from backends.connections import EngineSession
from backends.errors import BackendError
from backends.sglang.launch import EngineCommand, engine_commands
from backends.topology import Deployment, DeploymentInvalid, Engine, read_deployment

log = structlog.get_logger(__name__)


class WorkersEngines:
    """`run` as a task. settings: the operator's. Raises DeploymentInvalid if there is a file that can't be used."""

    def __init__(self, settings: Settings, session: EngineSession) -> None:
        self._settings = settings
        self._session = session
        self._launched = LaunchedEngines(settings.home, drain_s=settings.drain_seconds_max)
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
        await self._launched.run()

    async def reload(self) -> None:
        """As each worker does: a file that can't be used changes nothing. They say why, so this does not."""
        if self._settings.deployment is None:
            return
        try:
            self._take(await asyncio.to_thread(read_deployment, self._settings.deployment))
        except DeploymentInvalid:
            return

    def _take(self, deployment: Deployment) -> None:
        self._launched.want(self._uses(deployment))

    def _uses(self, deployment: Deployment) -> Iterator[tuple[EngineCommand, "_WorkersUse"]]:
        for model in deployment.models:
            engines: dict[str, Engine] = {name: engine for name, _, engine in model.engines()}
            for command in engine_commands(model):
                if command.program == "local":
                    client = EngineClient(engines[command.name].base_url, self._session, self._settings.backends)
                    yield command, _WorkersUse(client)


class _WorkersUse:
    """Implements EngineUse: the engine itself says whether anything runs there. Workers find out that it has begun."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def started(self, *, begun: bool) -> None:
        pass

    async def busy(self) -> bool:
        try:
            loads = await self._client.loads()
        except BackendError:
            return False
        return loads.running + loads.waiting > 0
