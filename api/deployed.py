"""The models of the deployment in force, as running parts: cards, prompt readers, replicas, and launched engines.

Made by wiring.py. `take` turns a deployment into parts and swaps them in at once, at the start and at each reload; what
stays the same in both keeps its state: a replica its holds and reports, a model its queue and what it has learned.
"""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

import structlog

from api.launched import LaunchedEngines
from api.settings import Settings
from backends.client import EngineClient
from backends.connections import EngineSession
from backends.round_trips import round_trips_s
from backends.sglang.attach import contradictions
from backends.sglang.launch import EngineCommand, engine_commands
from backends.sglang.probe import read_reports
from backends.topology import Deployment, DeploymentInvalid, Engine, Model, Pair, Role, read_deployment
from backends.topology import Replica as DeployedReplica
from gateway.catalogue import Catalogue, ModelCard
from gateway.errors import EngineUnavailable
from gateway.fleet import Fleet, ModelFleet
from gateway.prompt import PromptReader
from gateway.regions import RegionMap
from gateway.replica import Replica

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Key:
    """What makes a replica the same one after a reload: where its engines are, and how we start them if we do.

    rank: where an engine has several, the one that this replica is. ranks: of its engines. region: where they are.
    """

    model: str
    name: str
    urls: tuple[str, ...]
    bootstrap: tuple[str, int] | None
    commands: tuple[EngineCommand, ...]
    ranks: tuple[int, ...]
    rank: int | None
    region: str


class _ReplicaUse:
    """Implements EngineUse: what this process knows of a replica whose engine it starts."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def started(self, *, begun: bool) -> None:
        self._replica.serving = begun

    async def busy(self) -> bool:
        return len(self._replica.ledger) > 0


class Deployed:
    """catalogue, fleet, prompts: read by the pipeline at each request; only `take` changes what is in them.

    vetted: are engines asked what they are before they serve? The embedded default promises nothing to be checked.
    beside: what is served in any case and by other parts, to be published with the deployment's models.
    launches: does this process start the engines that the deployment launches? Of several workers none does.
    """

    def __init__(
        self,
        settings: Settings,
        session: EngineSession,
        threads: ThreadPoolExecutor,
        *,
        vetted: bool,
        beside: Sequence[ModelCard] = (),
        launches: bool = True,
    ) -> None:
        self.catalogue = Catalogue(())
        self.regions = RegionMap(settings.region)
        self.fleet = Fleet([], settings.gateway)
        self.prompts: dict[str, PromptReader] = {}
        self.engines = LaunchedEngines(settings.home, drain_s=settings.drain_seconds_max)
        self._settings = settings
        self._session = session
        self._threads = threads
        self._vetted = vetted
        self._beside = tuple(beside)
        self._launches = launches
        self._readers: dict[Path, PromptReader] = {}
        self._replicas: dict[_Key, Replica] = {}
        self._reloading = asyncio.Lock()

    async def reload(self) -> None:
        """Read the deployment file again. One that can't be used changes nothing, and it is said why."""
        path = self._settings.deployment
        if path is None:
            log.warning("nothing to reload: there is no deployment file")
            return
        async with self._reloading:
            try:
                deployment = await asyncio.to_thread(read_deployment, path)
                self._take(deployment, await asyncio.to_thread(self._read_tokenizers, deployment))
            except DeploymentInvalid as error:
                # The reason is for whoever wrote the file; a traceback would say nothing more.
                log.error("the deployment stays as it was", file=str(path), why=error.message)  # noqa: TRY400
            else:
                log.info("a new deployment is in force", models=[model.id for model in deployment.models])

    def take(self, deployment: Deployment) -> None:
        """Serve this deployment from now on. Raises DeploymentInvalid; nothing has changed then."""
        self._take(deployment, self._read_tokenizers(deployment))

    def _take(self, deployment: Deployment, readers: dict[Path, PromptReader]) -> None:
        """No request sees a mixture: nothing is awaited here."""
        cards = [_card(model) for model in deployment.models]
        replicas = {key: replica for model in deployment.models for key, replica in self._replicas_of(model)}
        left = [fleet for fleet in self.fleet.all() if fleet.model not in {model.id for model in deployment.models}]
        self._readers, self._replicas = readers, replicas
        self.regions.tell(round_trips_s(deployment.round_trips, self.regions.home))
        self.catalogue.replace([*cards, *self._beside])
        self.prompts.clear()
        self.prompts.update({model.id: readers[model.tokenizer] for model in deployment.models})
        self.fleet.replace([self._fleet_of(model, replicas) for model in deployment.models])
        if self._launches:
            self.engines.want(
                (command, _ReplicaUse(replica)) for key, replica in replicas.items() for command in key.commands
            )
        for fleet in left:
            fleet.room.refuse_all(EngineUnavailable(f"The model {fleet.model} is no longer served here."))

    def _read_tokenizers(self, deployment: Deployment) -> dict[Path, PromptReader]:
        readers = {}
        for folder in {model.tokenizer for model in deployment.models}:
            try:
                readers[folder] = self._readers.get(folder) or PromptReader(
                    folder, self._threads, inline_chars_max=self._settings.gateway.tokenise_inline_chars_max
                )
            except Exception as error:  # the tokenizer's library raises bare Exceptions
                raise DeploymentInvalid(f"tokenizer {folder} can't be read: {error}") from error
        return readers

    def _replicas_of(self, model: Model) -> Iterator[tuple[_Key, Replica]]:
        commands = {command.name: command for command in engine_commands(model) if command.program == "local"}
        for replica in model.replicas:
            region = replica.region or self.regions.home
            started = self._started(region, commands, replica.name)
            for rank in _ranks(replica):
                urls, ranks = (replica.base_url,), (replica.ranks,)
                key = _Key(model.id, replica.name, urls, None, started, ranks, rank, region)
                yield key, self._replica(key, model, replica)
        for pair in model.pairs:
            yield from self._pairs_of(model, pair, commands)

    def _started(self, region: str, commands: dict[str, EngineCommand], *names: str) -> tuple[EngineCommand, ...]:
        """What this gateway starts of it: engines of other regions are started there."""
        if region != self.regions.home:
            return ()
        return tuple(command for name in names if (command := commands.get(name)) is not None)

    def _pairs_of(self, model: Model, pair: Pair, commands: dict[str, EngineCommand]) -> Iterator[tuple[_Key, Replica]]:
        """A pair for each rank of decode; each rank of prefill serves as many of them."""
        region = pair.region or self.regions.home
        urls = (pair.prefill.base_url, pair.decode.base_url)
        started = self._started(region, commands, f"{pair.name}-prefill", f"{pair.name}-decode")
        prefill: dict[int | None, Replica] = {}
        for rank in _ranks(pair.decode):
            ranks = (pair.prefill.ranks, pair.decode.ranks)
            key = _Key(model.id, pair.name, urls, pair.bootstrap, started, ranks, rank, region)
            replica = self._pair(key, pair, prefill)
            assert replica.prefill is not None, "made as a pair"
            self._vet(replica, model, "decode", pair.decode)
            self._vet(replica.prefill, model, "prefill", pair.prefill)
            yield key, replica

    def _replica(self, key: _Key, model: Model, served: DeployedReplica) -> Replica:
        replica = self._replicas.get(key) or Replica(
            _named(served.name, key.rank), self._client(served), rank=key.rank, region=key.region
        )
        self._vet(replica, model, "unified", served)
        return replica

    def _pair(self, key: _Key, pair: Pair, prefill: dict[int | None, Replica]) -> Replica:
        """prefill: the halves by rank that its sisters have, too."""
        rank = None if pair.prefill.ranks == 1 else (key.rank or 0) % pair.prefill.ranks
        known = self._replicas.get(key)
        if known is not None:
            return known
        if rank not in prefill:
            name = _named(f"{pair.name}-prefill", rank)
            prefill[rank] = Replica(name, self._client(pair.prefill), rank=rank, region=key.region)
        return Replica(
            _named(pair.name, key.rank),
            self._client(pair.decode),
            prefill=prefill[rank],
            bootstrap=pair.bootstrap,
            rank=key.rank,
            region=key.region,
        )

    def _client(self, engine: Engine) -> EngineClient:
        return EngineClient(engine.base_url, self._session, self._settings.backends)

    def _vet(self, replica: Replica, model: Model, role: Role, engine: Engine) -> None:
        """Ask it what it is before it serves, whenever it has been away, and if the file promises other things."""
        if self._vetted:
            replica.reserved_tokens = engine.reserved_tokens
            promised = (model.model_copy(update={"replicas": (), "pairs": (), "serverless": None}), role, engine)
            replica.vet(promised, self._contradictions(model, role, engine))

    def _contradictions(self, model: Model, role: Role, engine: Engine) -> Callable[[], Awaitable[list[str]]]:
        async def ask() -> list[str]:
            reports = await read_reports(engine.base_url, within_s=self._settings.backends.connect_timeout_s)
            return contradictions(model, role, engine, reports)

        return ask

    def _fleet_of(self, model: Model, replicas: dict[_Key, Replica]) -> tuple[ModelFleet, list[Replica]]:
        """A model keeps its queue, and what has been learned of it, over a reload."""
        served = [replica for key, replica in replicas.items() if key.model == model.id]
        known = {fleet.model: fleet for fleet in self.fleet.all()}
        return known.get(model.id) or ModelFleet(
            model.id, [], self._settings.gateway, shared=bool(self._settings.pages_url), regions=self.regions
        ), served


def _ranks(engine: Engine) -> tuple[int | None, ...]:
    """Each is a replica; the one rank of an engine goes unnamed."""
    return (None,) if engine.ranks == 1 else tuple(range(engine.ranks))


def _named(name: str, rank: int | None) -> str:
    """Names of the file have no dots."""
    return name if rank is None else f"{name}.{rank}"


def _card(model: Model) -> ModelCard:
    """What tenants are told. Precisions that differ between replicas are all named."""
    engines = list(model.engines())
    prefill = {engine.weights.precision for _, role, engine in engines if role != "decode"}
    decode = {
        engine.weights.decode_precision or engine.weights.precision for _, role, engine in engines if role != "prefill"
    }
    try:
        config_path = model.tokenizer / "config.json"
        config, created = json.loads(config_path.read_text()), int(config_path.stat().st_mtime)
    except (OSError, ValueError) as error:
        raise DeploymentInvalid(f"{model.tokenizer}/config.json can't be read: {error}") from error
    parts = model.id.split("/")
    return ModelCard(
        id=model.id,
        created=created,
        owned_by=parts[-2] if len(parts) > 1 else "pagegate",
        description=f"{config.get('model_type', 'language')} model with a context of "
        f"{model.limits.context_tokens} tokens.",
        revision=hashlib.sha256(model.model_dump_json(exclude={"serverless"}).encode()).hexdigest()[:12],
        context_tokens=model.limits.context_tokens,
        output_tokens_max=model.limits.output_tokens_max,
        precisions={
            "prefill_weights": ", ".join(sorted(prefill)),
            "decode_weights": ", ".join(sorted(decode)),
            "kv_cache": model.kv_cache_dtype,
        },
        price=model.price,
        retires_at_ns=_midnight_ns(model.deprecation_date),
        quality=model.quality,
    )


def _midnight_ns(day: date | None) -> int | None:
    """The UTC instant at which the day begins."""
    if day is None:
        return None
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000_000
