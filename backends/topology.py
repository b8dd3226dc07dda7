"""What is deployed: models, their replicas or prefill/decode pairs, and in which precision. One typed TOML file.

`pagegate config check FILE` and `pagegate engine command` read it; command lines (sglang/launch.py) and the check of
attached servers (sglang/attach.py) follow from it. Knows no prices, only their ids; does no network and starts nothing.

    [[models]]                    id, price, tokenizer, limits, precisions, page size, page tags
      [models.serverless]         when its replicas and pairs sleep (serverless.py); left out: never
      [models.rollout]            how a new revision is tried beside the old one (rollout.py)
      [[models.replicas]]         name, revision, weights, and where: `url` to attach to, or [….launch] to start it
      [[models.pairs]]            name, revision, transfer, [….prefill] and [….decode]: each as a replica
      [[models.groups]]           revision, transfer, [[….prefill]] and [[….decode]]: several of each (halves.py)
    [[round_trips]]               between regions, where replicas and pairs are in several (round_trips.py)
    [[machines]]                  where engines live that share memory: name, memory, GPUs
"""

import tomllib
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from backends.engine_tables import Engine, Name, Role, Table
from backends.errors import BackendError
from backends.halves import Group, Handover, Pair, Sides
from backends.machines import Housed, Machine, Memory, never_fits, together
from backends.rollout import STABLE, Rollout
from backends.round_trips import RegionName, RoundTrip, twice_told
from backends.serverless import Serverless

_Measure = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Figure = Annotated[str, StringConstraints(min_length=1, max_length=60)]


class DeploymentInvalid(BackendError):
    """A deployment file that can't be used. The message has a line a fault: the key, its value, what is wrong."""

    code = "deployment_invalid"


class Replica(Engine):
    """One engine that does both phases."""

    name: Name
    region: RegionName | None = Field(default=None, description="Where it is; left out: where the gateway is.")
    revision: Name = Field(default=STABLE, description="Of the model, that it serves.")


class Limits(Table):
    context_tokens: int = Field(ge=1, description="Prompt and output together.")
    output_tokens_max: int = Field(ge=1, description="Output of one request.")

    @model_validator(mode="after")
    def _output_fits(self) -> Self:
        if self.output_tokens_max > self.context_tokens:
            raise ValueError(f"output_tokens_max {self.output_tokens_max} is over context_tokens {self.context_tokens}")
        return self


class Model(Table):
    """One public model: what tenants are told of it, and the engines that serve it."""

    id: str = Field(min_length=1, max_length=200, description="Public id.")
    price: str = Field(min_length=1, description="Id of the price in the price book.")
    tokenizer: Path = Field(description="Folder with tokenizer.json, tokenizer_config.json and config.json.")
    limits: Limits
    kv_cache_dtype: Literal["bf16", "fp8_e4m3"] = Field(
        description="Said, never auto: a pair's two sides must agree, and tenants are told."
    )
    page_tokens: Literal[1, 16, 32, 64, 128]
    page_tags: bool = Field(description="Required: an engine that doesn't check page tags is refused.")
    deprecation_date: date | None = Field(
        default=None, description="UTC day from which on requests are refused with 410; tenants are told before."
    )
    quality: dict[_Measure, _Figure] = Field(
        default={},
        max_length=20,
        description="What these precisions were measured to do to the answers, such as"
        ' "top-1 agreement with bf16, GSM8K" = "0.97"; tenants are told.',
    )
    serverless: Serverless | None = Field(default=None, description="Left out: always awake.")
    rollout: Rollout | None = Field(default=None, description="Left out: all engines are of one revision.")
    replicas: tuple[Replica, ...] = ()
    pairs: tuple[Pair, ...] = ()
    groups: tuple[Group, ...] = ()

    @model_validator(mode="after")
    def _sleeps_and_wakes(self) -> Self:
        """Whoever sleeps has to be put to sleep and woken by somebody who knows how."""
        if self.serverless is None:
            return self
        if fault := self.serverless.fault(units=min(Counter(self.roles().values()).values(), default=0)):
            raise ValueError(f"serverless: {fault}")
        if self.groups and (len(self.groups) > 1 or self.replicas or self.pairs):
            raise ValueError("serverless: a group whose halves sleep serves its model alone")
        if self.groups and any(engine.machine is not None for _, _, engine in self.engines()):
            raise ValueError("serverless: the halves of a group share no machine with others that sleep")
        attached = next((name for name, _, engine in self.engines() if not (engine.launch or engine.managed)), None)
        if attached is not None:
            raise ValueError(
                f"serverless: {attached} is attached to by url, and nobody is named (managed) who starts and stops it"
            )
        return self

    @model_validator(mode="after")
    def _served_by_named_engines(self) -> Self:
        names = [replica.name for replica in self.replicas] + [pair.name for pair in self.pairs]
        halves = [half.name for group in self.groups for half in (*group.prefill, *group.decode)]
        if not names and not halves:
            raise ValueError("neither replicas nor pairs serve it")
        if twice := _twice(iter(names + halves)):
            raise ValueError(f"the name {twice} stands for two replicas or pairs")
        if halves and (twice := _twice(name for name, _, _ in self.engines())):
            raise ValueError(f"the name {twice} stands for two engines")
        return self

    @model_validator(mode="after")
    def _revisions_share_as_said(self) -> Self:
        names = self.revisions
        if self.rollout is None:
            if len(names) > 1:
                raise ValueError(
                    f"its engines are of the revisions {', '.join(names)}, and no rollout says how they share"
                )
        elif self.rollout.revision not in names:
            raise ValueError(f"rollout: no replica or pair is of the revision {self.rollout.revision}")
        elif len(names) != 2:
            raise ValueError(f"rollout: it is between two revisions, and the file has {', '.join(names)}")
        return self

    @property
    def revisions(self) -> tuple[str, ...]:
        """Of its replicas, pairs and groups, each once."""
        return tuple(dict.fromkeys(one.revision for one in self._served_by()))

    @property
    def regions(self) -> frozenset[str | None]:
        """Where its engines are; None: where the gateway is."""
        return frozenset(one.region for one in self._served_by())

    def _served_by(self) -> Iterator[Replica | Pair | Group]:
        yield from self.replicas
        yield from self.pairs
        yield from self.groups

    @property
    def old_revision(self) -> str:
        """The one that a new one is compared with; the only one where there is no rollout."""
        return next(name for name in self.revisions if self.rollout is None or name != self.rollout.revision)

    def of_revision(self, name: str) -> "Model":
        """The model as if it had this revision alone."""
        return self.model_copy(
            update={
                "replicas": tuple(replica for replica in self.replicas if replica.revision == name),
                "pairs": tuple(pair for pair in self.pairs if pair.revision == name),
                "groups": tuple(group for group in self.groups if group.revision == name),
                "rollout": None,
            }
        )

    def engines(self) -> Iterator[tuple[str, Role, Engine]]:
        """All engines with the names that logs and commands use, such as `a` or `b-prefill`."""
        for replica in self.replicas:
            yield replica.name, "unified", replica
        for sides in self.sides():
            for half in sides.prefill:
                yield half.name, "prefill", half.engine
            for half in sides.decode:
                yield half.name, "decode", half.engine

    def roles(self) -> dict[str, Role]:
        """By unit, what it does: a half of a group one phase, all others both."""
        found: dict[str, Role] = {name: "unified" for name, _ in self.units()}
        for group in self.groups:
            found |= {half.name: "prefill" for half in group.prefill}
            found |= {half.name: "decode" for half in group.decode}
        return found

    def sides(self) -> Iterator[Sides]:
        """Of its pairs and groups."""
        yield from (pair.sides for pair in self.pairs)
        yield from (group.sides for group in self.groups)

    def handovers(self) -> dict[str, Handover]:
        """By engine that is half a pair, or of a group."""
        found: dict[str, Handover] = {}
        for pair in self.pairs:
            found |= pair.handovers()
        for group in self.groups:
            found |= group.handovers()
        return found

    def gateway_launches(self, engine: Engine) -> bool:
        """Is it a process of `pagegate serve`? SGLang is where somebody has to wake it, else it outlives gateways."""
        return engine.launch is not None and (engine.launch.program == "local" or self.serverless is not None)

    @property
    def awake_min(self) -> int:
        """So many of its units never sleep, at some time of the week."""
        return len(tuple(self.units())) if self.serverless is None else self.serverless.replicas_min_ever

    def units(self) -> Iterator[tuple[str, tuple[Engine, ...]]]:
        """What wakes and sleeps as one, by its name in the file: a replica, both halves of a pair, a group's half."""
        for replica in self.replicas:
            yield replica.name, (replica,)
        for sides in self.sides():
            units: dict[str, tuple[Engine, ...]] = {}
            for half in (*sides.prefill, *sides.decode):
                units[half.unit] = (*units.get(half.unit, ()), half.engine)
            yield from units.items()


class Deployment(Table):
    """The whole file."""

    models: tuple[Model, ...]
    machines: tuple[Machine, ...] = ()
    round_trips: tuple[RoundTrip, ...] = Field(
        default=(), description="Between regions; what isn't here is measured by the gateway."
    )

    @model_validator(mode="after")
    def _nothing_stands_twice(self) -> Self:
        if not self.models:
            raise ValueError("it deploys no model")
        if twice := _twice(model.id for model in self.models):
            raise ValueError(f"the model {twice} is listed twice")
        if twice := _twice(engine.base_url for model in self.models for _, _, engine in model.engines()):
            raise ValueError(f"two engines are at {twice}")
        if twice := _twice(machine.name for machine in self.machines):
            raise ValueError(f"the machine {twice} is listed twice")
        if twice := twice_told(self.round_trips):
            raise ValueError(f"the round trip between {twice} is listed twice")
        return self

    @model_validator(mode="after")
    def _round_trips_lead_somewhere(self) -> Self:
        """To a region that no engine is in a name leads that was written wrongly, perhaps. A gateway may be there."""
        engines = {region for model in self.models for region in model.regions}
        for trip in self.round_trips:
            if None not in engines and not engines & set(trip.between):
                raise ValueError(f"no replica or pair is in {' or '.join(trip.between)}, between which is a round trip")
        return self

    @model_validator(mode="after")
    def _everything_can_be_awake(self) -> Self:
        housed = (Housed(model.id, self.housed(model), model.awake_min) for model in self.models)
        if faults := list(never_fits(self.machines, housed)):
            raise ValueError("; ".join(faults))
        return self

    def housed(self, model: Model) -> dict[str, Memory]:
        """What each of its units takes while awake; nothing that is known of for those without a machine."""
        return {name: together(map(self._taken, engines)) for name, engines in model.units()}

    def _taken(self, engine: Engine) -> Memory:
        if engine.machine is None:
            return {}
        assert engine.memory_gib is not None, "they go together"
        for machine in self.machines:
            if machine.name == engine.machine:
                return machine.taken(engine.memory_gib, engine.launch.gpus if engine.launch is not None else ())
        raise ValueError(f"an engine is on the machine {engine.machine}, which [[machines]] does not list")

    def model(self, model_id: str) -> Model:
        """Raises DeploymentInvalid if the file has no such model."""
        for model in self.models:
            if model.id == model_id:
                return model
        raise DeploymentInvalid(f"no model {model_id}; the file has {', '.join(model.id for model in self.models)}")


def _twice(values: Iterator[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)


def read_deployment(path: Path) -> Deployment:
    """Raises DeploymentInvalid, with a line a fault."""
    try:
        fields = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise DeploymentInvalid(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise DeploymentInvalid(f"{path} is not TOML: {error}") from error
    try:
        return Deployment.model_validate(fields)
    except ValidationError as error:
        raise DeploymentInvalid("\n".join(_faults(error))) from error


def _faults(error: ValidationError) -> Iterator[str]:
    for fault in error.errors(include_url=False):
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
        if fault["type"] == "extra_forbidden":
            text = "is not a key that is known here"
        else:
            text = fault["msg"].removeprefix("Value error, ")
            # A table's own fault names its keys; repeating the whole table would hide them.
            if not isinstance(fault["input"], dict | BaseModel) and fault["type"] != "missing":
                text = f"{fault['input']!r}: {text}"
        yield f"{key or 'the file'}: {text}"
