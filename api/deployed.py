"""The models of the deployment in force, as running parts: cards, prompt readers, replicas, and units that may sleep.

Made by wiring.py. `take` turns a deployment into parts and swaps them in at once, at the start and at each reload; what
stays the same in both keeps its state: a replica its holds and reports, a model its queue and what it has learned.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from api.launched import started_here
from api.lifecycle import Lifecycle
from api.model_cards import card_of, served_of
from api.settings import Settings
from backends.client import EngineClient
from backends.connections import EngineSession
from backends.engine_tables import Engine, Role
from backends.halves import NamedHalf, Sides
from backends.round_trips import round_trips_s
from backends.sglang.attach import contradictions
from backends.sglang.launch import EngineCommand
from backends.sglang.probe import read_reports
from backends.topology import Deployment, DeploymentInvalid, Model, read_deployment
from backends.topology import Replica as DeployedReplica
from gateway.catalogue import Catalogue, ModelCard
from gateway.errors import EngineUnavailable, GatewayError
from gateway.fleet import Fleet
from gateway.lifecycle.states import Record, State, Unit
from gateway.model_fleet import ModelFleet
from gateway.prompt import PromptReader
from gateway.regions import RegionMap
from gateway.replica import Replica
from gateway.rollouts.trials import Trials
from gateway.want import Want
from tenancy.errors import TenancyError

log = structlog.get_logger(__name__)

# In which states of its unit a replica is not asked how it is: nothing of it runs, or not for us yet.
_SILENT = frozenset({State.ASLEEP, State.WARMING, State.FAILED})


@dataclass(frozen=True, slots=True)
class _Key:
    """What makes a replica, or a prefill half, the same one after a reload: where its engines are, and how we start
    them if we do.

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


@dataclass(frozen=True, slots=True)
class _Made:
    """Of a deployment: what is placed by, and beside it the prefill halves of what only decodes."""

    replicas: dict[_Key, Replica] = field(default_factory=dict)
    halves: dict[_Key, Replica] = field(default_factory=dict)


class Deployed:
    """catalogue, fleet, prompts: read by the pipeline at each request; only `take` changes what is in them.

    vetted: are engines asked what they are before they serve? The embedded default promises nothing to be checked.
    trials: which revisions of the file's models serve, and who is served by which.
    beside: what is served in any case and by other parts, to be published with the deployment's models.
    """

    def __init__(
        self,
        settings: Settings,
        session: EngineSession,
        threads: ThreadPoolExecutor,
        lifecycle: Lifecycle,
        *,
        vetted: bool,
        trials: Trials,
        beside: Sequence[ModelCard] = (),
    ) -> None:
        self.catalogue = Catalogue(())
        self.regions = RegionMap(settings.region)
        self.fleet = Fleet([], settings.gateway)
        self.prompts: dict[str, PromptReader] = {}
        self._lifecycle = lifecycle
        lifecycle.tell(self._stand, self._stand_alone)
        self._settings = settings
        self._session = session
        self._threads = threads
        self._vetted = vetted
        self._trials = trials
        self._file: Deployment | None = None  # as it was read: with revisions that serve nobody any more
        self._beside = tuple(beside)
        self._readers: dict[Path, PromptReader] = {}
        self._made = _Made()
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
                readers = await asyncio.to_thread(self._read_tokenizers, deployment)
                await self._trials.declare(deployment)
                self._take(deployment, readers)
            except TenancyError as error:
                log.error("the deployment stays as it was", file=str(path), why=error.message)  # noqa: TRY400 - as below
            except DeploymentInvalid as error:
                # The reason is for whoever wrote the file; a traceback would say nothing more.
                log.error("the deployment stays as it was", file=str(path), why=error.message)  # noqa: TRY400
            else:
                log.info("a new deployment is in force", models=[model.id for model in deployment.models])

    async def take(self, deployment: Deployment) -> None:
        """Serve this deployment from now on. Raises DeploymentInvalid, and then nothing has changed; TenancyError."""
        readers = self._read_tokenizers(deployment)
        await self._trials.declare(deployment)
        self._take(deployment, readers)

    async def follow_rollouts(self) -> None:
        """See what was decided of them; a revision that is to serve nobody any more ends its streams and then goes."""
        async with self._reloading:
            if await self._trials.refresh() and self._file is not None:
                self._take(self._file, self._readers)

    def _take(self, file: Deployment, readers: dict[Path, PromptReader]) -> None:
        """No request sees a mixture: nothing is awaited here."""
        deployment = self._trials.in_force(file)
        cards = [card_of(model) for model in deployment.models]
        made, before = _Made(), self._made
        for model in deployment.models:
            self._made_of(model, made)
        begun = [replica for key, replica in made.replicas.items() if key.commands and key not in before.replicas]
        begun += [half for key, half in made.halves.items() if key.commands and key not in before.halves]
        left = [fleet for fleet in self.fleet.all() if fleet.model not in {model.id for model in deployment.models}]
        self._file, self._readers, self._made = file, readers, made
        self.regions.tell(round_trips_s(deployment.round_trips, self.regions.home))
        self.catalogue.replace([*cards, *self._beside])
        self.prompts.clear()
        self.prompts.update({model.id: readers[model.tokenizer] for model in deployment.models})
        self.fleet.replace([self._fleet_of(model, made.replicas) for model in deployment.models])
        for fleet in self.fleet.all():
            trial = self._trials.by_model.get(fleet.model)
            fleet.split = None if trial is None else trial.split
            fleet.tally = None if trial is None or trial.split is None else trial.tally
        self._lifecycle.take(deployment)
        if self._lifecycle.keeps:
            for replica in begun:  # by this process, which says when
                replica.serving, replica.asleep = False, True
        for record in self._lifecycle.waking.records():
            if not self._lifecycle.keeps_unit(record.unit):
                self._stand(record)
        for fleet in left:
            fleet.room.refuse_all(EngineUnavailable(f"The model {fleet.model} is no longer served here."))

    def _stand(self, record: Record) -> None:
        """What a unit's state means for its replicas here."""
        state, served = record.state, self._fleet_with(record.unit)
        if served is None:
            return
        for replica in self._of_unit(record.unit):
            served.stand(replica, serving=state is State.READY, asleep=state in _SILENT)
        if state is State.FAILED:
            served.room.refuse(partial(self._end_of_wait, served))

    def _end_of_wait(self, served: ModelFleet, want: Want) -> GatewayError | None:
        """What whoever waits there is told when a unit has failed; None: some engine may serve it yet."""
        if served.up_in(want.regions):
            return None
        return self._lifecycle.waking.end_of_wait(served.model, served.units_in(want.regions))

    def _stand_alone(self, unit: Unit) -> None:
        """Nobody says any more how it stands: its replicas are judged by what they answer."""
        if (served := self._fleet_with(unit)) is not None:
            for replica in self._of_unit(unit):
                served.stand(replica, serving=True, asleep=False)

    def _fleet_with(self, unit: Unit) -> ModelFleet | None:
        return {fleet.model: fleet for fleet in self.fleet.all()}.get(unit.model)

    def _of_unit(self, unit: Unit) -> list[Replica]:
        """A prefill half too, where it is a unit of its own."""
        of_model = [replica for key, replica in self._made.replicas.items() if key.model == unit.model]
        found = [replica for replica in of_model if replica.unit == unit.name]
        halves = [half for key, half in self._made.halves.items() if key.model == unit.model]
        return found or [half for half in halves if half.unit == unit.name]

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

    def _made_of(self, model: Model, made: _Made) -> None:
        started = started_here(model, self.regions.home)
        for replica in model.replicas:
            region = replica.region or self.regions.home
            urls, ranks = (replica.base_url,), (replica.ranks,)
            for rank in _ranks(replica):
                key = _Key(model.id, replica.name, urls, None, started[replica.name], ranks, rank, region)
                made.replicas[key] = self._replica(key, model, replica)
        for sides in model.sides():
            self._made_of_sides(model, sides, started, made)

    def _made_of_sides(
        self, model: Model, sides: Sides, started: dict[str, tuple[EngineCommand, ...]], made: _Made
    ) -> None:
        """A replica for each rank of each decode half, and beside it the halves that compute prompts for it."""
        region = sides.region or self.regions.home
        prefills: dict[tuple[str, int | None], Replica] = {}
        for half in sides.prefill:
            engine, ranks = half.engine, (half.engine.ranks,)
            for rank in _ranks(engine):
                key = _Key(
                    model.id, half.unit, (engine.base_url,), half.bootstrap, started[half.unit], ranks, rank, region
                )
                found = self._made.halves.get(key) or Replica(
                    _named(half.name, rank),
                    self._client(engine),
                    bootstrap=half.bootstrap,
                    rank=rank,
                    region=region,
                    unit=half.unit,
                )
                self._vet(found, model, "prefill", engine)
                made.halves[key] = prefills[half.name, rank] = found
        # Equal ranks get the same tuple, which is how placing knows that they ask for the same.
        by_rank: dict[int | None, tuple[Replica, ...]] = {}
        for half in sides.decode:
            for rank in _ranks(half.engine):
                if rank not in by_rank:
                    by_rank[rank] = tuple(prefills[one.name, _met_by(rank, one.engine)] for one in sides.prefill)
                key = _decode_key(model, sides, half, started=started[half.unit], rank=rank, region=region)
                replica = self._made.replicas.get(key) or Replica(
                    _named(half.unit, rank), self._client(half.engine), rank=rank, region=region
                )
                replica.prefills = by_rank[rank]
                replica.served = served_of(model, sides.revision, sides.prefill[0].engine, half.engine)
                self._vet(replica, model, "decode", half.engine)
                made.replicas[key] = replica

    def _replica(self, key: _Key, model: Model, served: DeployedReplica) -> Replica:
        replica = self._made.replicas.get(key) or Replica(
            _named(served.name, key.rank), self._client(served), rank=key.rank, region=key.region
        )
        replica.served = served_of(model, served.revision, served)
        self._vet(replica, model, "unified", served)
        return replica

    def _client(self, engine: Engine) -> EngineClient:
        return EngineClient(engine.base_url, self._session, self._settings.backends)

    def _vet(self, replica: Replica, model: Model, role: Role, engine: Engine) -> None:
        """Ask it what it is before it serves, whenever it has been away, and if the file promises other things."""
        if self._vetted:
            replica.reserved_tokens = engine.reserved_tokens
            promised = (
                model.model_copy(
                    update={"replicas": (), "pairs": (), "groups": (), "serverless": None, "rollout": None}
                ),
                role,
                engine,
            )
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


def _decode_key(
    model: Model,
    sides: Sides,
    half: NamedHalf,
    *,
    started: tuple[EngineCommand, ...],
    rank: int | None,
    region: str,
) -> _Key:
    """A pair is another one where its prefill half is; in a group those come and go."""
    own = [one for one in sides.prefill if one.unit == half.unit]
    engines = [one.engine for one in own] + [half.engine]
    bootstrap = own[0].bootstrap if own else None
    urls, ranks = tuple(one.base_url for one in engines), tuple(one.ranks for one in engines)
    return _Key(model.id, half.unit, urls, bootstrap, started, ranks, rank, region)


def _met_by(rank: int | None, prefill: Engine) -> int | None:
    """The rank of a prefill half at which a rank of decode gets its pages."""
    return None if prefill.ranks == 1 else (rank or 0) % prefill.ranks


def _ranks(engine: Engine) -> tuple[int | None, ...]:
    """Each is a replica; the one rank of an engine goes unnamed."""
    return (None,) if engine.ranks == 1 else tuple(range(engine.ranks))


def _named(name: str, rank: int | None) -> str:
    """Names of the file have no dots."""
    return name if rank is None else f"{name}.{rank}"
