"""What is deployed: models, their replicas or prefill/decode pairs, and in which precision. One typed TOML file.

`pagegate config check FILE` and `pagegate engine command` read it; command lines (sglang/launch.py) and the check of
attached servers (sglang/attach.py) follow from it. Knows no prices, only their ids; does no network and starts nothing.

    [[models]]                    id, price, tokenizer, limits, precisions, page size, page tags
      [models.serverless]         when its replicas and pairs sleep (serverless.py); left out: never
      [models.rollout]            how a new revision is tried beside the old one (rollout.py)
      [[models.replicas]]         name, revision, weights, and where: `url` to attach to, or [….launch] to start it
      [[models.pairs]]            name, revision, transfer, [….prefill] and [….decode]: each as a replica
    [[round_trips]]               between regions, where replicas and pairs are in several (round_trips.py)
    [[machines]]                  where engines live that share memory: name, memory, GPUs
"""

import tomllib
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from backends.errors import BackendError
from backends.machines import Housed, Machine, Memory, never_fits, together
from backends.managed import Managed
from backends.rollout import STABLE, Rollout
from backends.round_trips import RegionName, RoundTrip, twice_told
from backends.serverless import Serverless

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
_Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
_Measure = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Figure = Annotated[str, StringConstraints(min_length=1, max_length=60)]
_Flag = Annotated[str, StringConstraints(min_length=1, max_length=1000)]

Role = Literal["unified", "prefill", "decode"]
Program = Literal["sglang", "local"]

# Flags that follow from other keys of the file, or that admission and billing rely on: an `extra` that names one would
# say a second, different thing.
GOVERNED_FLAGS = frozenset(
    {
        "--model-path", "--model", "--tokenizer-path", "--served-model-name", "--host", "--port", "--quantization",
        "--quantization-param-path", "--kv-cache-dtype", "--page-size", "--context-length", "--tp-size",
        "--tensor-parallel-size", "--tp", "--pp-size", "--pipeline-parallel-size", "--pp", "--dp-size",
        "--data-parallel-size", "--dp", "--ep-size", "--expert-parallel-size", "--ep", "--mem-fraction-static",
        "--max-total-tokens", "--max-running-requests", "--chunked-prefill-size", "--schedule-conservativeness",
        "--enable-metrics", "--enable-cache-report", "--disaggregation-mode", "--disaggregation-transfer-backend",
        "--disaggregation-bootstrap-port", "--disable-radix-cache", "--enable-priority-scheduling", "--enable-lora",
        "--enable-memory-saver", "--enable-weights-cpu-backup",
    }
)  # fmt: skip


class DeploymentInvalid(BackendError):
    """A deployment file that can't be used. The message has a line a fault: the key, its value, what is wrong."""

    code = "deployment_invalid"


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Weights(_Table):
    """One checkpoint as one engine loads it."""

    checkpoint: str = Field(min_length=1, description="Folder (or repository id) that the engine loads.")
    digest: _Digest | None = Field(
        default=None, description="What `cat *.safetensors | sha256sum` says in that folder, as sha256:…"
    )
    precision: Literal["bf16", "fp8", "int4", "nvfp4"] = Field(description="Of the weights; tenants are told.")
    decode_precision: Literal["bf16", "fp8", "int4"] | None = Field(
        default=None, description="Of a second copy for the decode phase, which only the local engine can hold."
    )
    quantization: str | None = Field(
        default=None, description="SGLang's --quantization, where the checkpoint's own config does not say it."
    )
    kv_scales: Path | None = Field(default=None, description="JSON file of KV scales: --quantization-param-path.")
    kv_scales_digest: _Digest | None = Field(default=None, description="sha256 of the KV scales in use.")


class Launch(_Table):
    """How to start one engine. Sizes left out are SGLang's choice.

    `pagegate serve` starts the local engine, and SGLang if its model has [models.serverless], on its own machine; else
    `pagegate engine up` starts SGLang where it is to run.
    """

    program: Program = Field(default="sglang", description="SGLang, or the engine that comes with this project.")
    python: str = Field(default="python3", description="Interpreter of the environment that SGLang is installed in.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that the engine listens on.")
    port: int = Field(ge=1, le=65535, description="Port that the engine listens on.")
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(), description="CUDA_VISIBLE_DEVICES; empty: all.")
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    data_parallel: int = Field(default=1, ge=1)
    expert_parallel: int = Field(default=1, ge=1)
    memory_fraction: float | None = Field(default=None, gt=0, lt=1, description="Of a GPU, for weights and KV pages.")
    total_tokens_max: int | None = Field(default=None, ge=1, description="Bound on the KV pool in tokens.")
    running_requests_max: int | None = Field(default=None, ge=1, description="Requests in one batch.")
    prefill_chunk_tokens: int | None = Field(default=None, ge=1, description="Prompt tokens of one step.")
    reserved_output_tokens_max: int = Field(
        default=256,
        ge=1,
        description="SGLang reserves at most this much output for a request it starts. Its own 4096 would queue, inside"
        " the engine, what admission has found room for.",
    )
    schedule_conservativeness: float = Field(
        default=0.3, gt=0, le=1, description="Scales SGLang's reserve for running requests, for the same reason."
    )
    extra: tuple[_Flag, ...] = Field(default=(), description="Further flags and their values, passed as they are.")
    environment: dict[str, str] = Field(default={}, description="Further variables of the engine's process.")

    @model_validator(mode="after")
    def _local_has_one_rank(self) -> Self:
        if self.program == "local" and self.data_parallel > 1:
            raise ValueError("data_parallel: the local engine has one rank")
        return self

    @model_validator(mode="after")
    def _extra_says_nothing_twice(self) -> Self:
        for flag in self.extra:
            name = flag.partition("=")[0]
            if self.program == "sglang" and name in GOVERNED_FLAGS:
                raise ValueError(f"extra names {name}, which follows from other keys of this file")
        if "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION" in self.environment:
            raise ValueError("environment names what reserved_output_tokens_max says")
        return self


class Engine(_Table):
    """One SGLang server: attached to by `url`, or started by `launch`."""

    weights: Weights
    url: AnyHttpUrl | None = None
    launch: Launch | None = None
    managed: Managed | None = Field(
        default=None, description="Of an engine attached to by url: what starts and stops it on this gateway's word."
    )
    reserved_output_tokens_max: int = Field(
        default=4096,
        ge=1,
        description="Of an engine attached to by url, which doesn't say it: its SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION."
        " Admission lets in what that leaves room for; launched engines have their own key.",
    )
    data_parallel: int = Field(
        default=1,
        ge=1,
        description="Of an engine attached to by url: its --dp-size. Launched engines have their own key.",
    )
    machine: _Name | None = Field(default=None, description="The one of [[machines]] that it lives on.")
    memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="What it takes there while awake, all in all; on each of its GPUs if it has some.",
    )

    @model_validator(mode="after")
    def _lives_with_a_size(self) -> Self:
        if (self.machine is None) != (self.memory_gib is None):
            raise ValueError("machine and memory_gib go together")
        return self

    @model_validator(mode="after")
    def _one_way_to_have_it(self) -> Self:
        if (self.url is None) == (self.launch is None):
            raise ValueError("exactly one of url and launch says where the engine is")
        if self.managed is not None and self.url is None:
            raise ValueError("managed says who starts an engine that is attached to by url")
        if self.launch is not None and self.data_parallel > 1:
            raise ValueError("data_parallel of a launched engine stands in its launch table")
        return self

    @model_validator(mode="after")
    def _one_copy_in_sglang(self) -> Self:
        if self.weights.decode_precision and self.launch is not None and self.launch.program == "sglang":
            raise ValueError("decode_precision: SGLang loads one copy of the weights; a pair has one a side")
        return self

    @property
    def reserved_tokens(self) -> int:
        """What the engine reserves at most for each request's output; the local one reserves nothing."""
        if self.launch is None:
            return self.reserved_output_tokens_max
        return 0 if self.launch.program == "local" else self.launch.reserved_output_tokens_max

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: each has a KV pool of its own, and a request runs on one."""
        return self.data_parallel if self.launch is None else self.launch.data_parallel

    @property
    def base_url(self) -> str:
        if self.url is not None:
            return str(self.url).rstrip("/")
        assert self.launch is not None
        host = f"[{self.launch.host}]" if ":" in self.launch.host else self.launch.host
        return f"http://{host}:{self.launch.port}"


class Replica(Engine):
    """One engine that does both phases."""

    name: _Name
    region: RegionName | None = Field(default=None, description="Where it is; left out: where the gateway is.")
    revision: _Name = Field(default=STABLE, description="Of the model, that it serves.")


class Pair(_Table):
    """Two engines: one computes prompts, the other generates from the pages that it is sent."""

    name: _Name
    region: RegionName | None = Field(
        default=None, description="Where both halves are; left out: where the gateway is."
    )
    revision: _Name = Field(default=STABLE, description="As a replica's.")
    transfer: Literal["mooncake", "nixl", "mooncake_tcp"] = "mooncake"
    bootstrap_port: int = Field(default=8998, ge=1, le=65535, description="Where prefill says how to reach it.")
    prefill: Engine
    decode: Engine

    @property
    def bootstrap(self) -> tuple[str, int]:
        """Host and port at which decode asks prefill for its pages."""
        launch, url = self.prefill.launch, self.prefill.url
        host = launch.host if launch is not None else url.host if url is not None else None
        assert host, "an engine is launched or at a URL"
        return host, self.bootstrap_port

    @model_validator(mode="after")
    def _switched_as_one(self) -> Self:
        one, other = self.prefill.managed, self.decode.managed
        if (one is None) != (other is None) or (one and other and (one.systemd is None) != (other.systemd is None)):
            raise ValueError("managed: the halves of a pair start and stop as one, by one manager")
        return self

    @model_validator(mode="after")
    def _same_kv_scales(self) -> Self:
        """SGLang's handshake compares dtype and page size, not scales: unequal ones garble the cache silently."""
        one, other = self.prefill.weights.kv_scales_digest, self.decode.weights.kv_scales_digest
        if one != other:
            raise ValueError(f"kv_scales_digest differs: prefill has {one}, decode has {other}")
        return self

    @model_validator(mode="after")
    def _ranks_meet(self) -> Self:
        """Each rank of decode gets its pages from one rank of prefill, and no rank of prefill stands idle."""
        prefill, decode = self.prefill.ranks, self.decode.ranks
        if decode % prefill:
            raise ValueError(
                f"data_parallel is {decode} on the decode side, which is no multiple of prefill's {prefill}"
            )
        return self


class Limits(_Table):
    context_tokens: int = Field(ge=1, description="Prompt and output together.")
    output_tokens_max: int = Field(ge=1, description="Output of one request.")

    @model_validator(mode="after")
    def _output_fits(self) -> Self:
        if self.output_tokens_max > self.context_tokens:
            raise ValueError(f"output_tokens_max {self.output_tokens_max} is over context_tokens {self.context_tokens}")
        return self


class Model(_Table):
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

    @model_validator(mode="after")
    def _sleeps_and_wakes(self) -> Self:
        """Whoever sleeps has to be put to sleep and woken by somebody who knows how."""
        if self.serverless is None:
            return self
        if fault := self.serverless.fault(units=len(self.replicas) + len(self.pairs)):
            raise ValueError(f"serverless: {fault}")
        attached = next((name for name, _, engine in self.engines() if not (engine.launch or engine.managed)), None)
        if attached is not None:
            raise ValueError(
                f"serverless: {attached} is attached to by url, and nobody is named (managed) who starts and stops it"
            )
        return self

    @model_validator(mode="after")
    def _served_by_named_engines(self) -> Self:
        names = Counter([replica.name for replica in self.replicas] + [pair.name for pair in self.pairs])
        if not names:
            raise ValueError("neither replicas nor pairs serve it")
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"the name {twice[0]} stands for two replicas or pairs")
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
        """Of its replicas and pairs, each once."""
        names = [replica.revision for replica in self.replicas] + [pair.revision for pair in self.pairs]
        return tuple(dict.fromkeys(names))

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
                "rollout": None,
            }
        )

    def engines(self) -> Iterator[tuple[str, Role, Engine]]:
        """All engines with the names that logs and commands use, such as `a` or `b-prefill`."""
        for replica in self.replicas:
            yield replica.name, "unified", replica
        for pair in self.pairs:
            yield f"{pair.name}-prefill", "prefill", pair.prefill
            yield f"{pair.name}-decode", "decode", pair.decode

    def gateway_launches(self, engine: Engine) -> bool:
        """Is it a process of `pagegate serve`? SGLang is where somebody has to wake it, else it outlives gateways."""
        return engine.launch is not None and (engine.launch.program == "local" or self.serverless is not None)

    @property
    def awake_min(self) -> int:
        """So many of its units never sleep, at some time of the week."""
        return len(tuple(self.units())) if self.serverless is None else self.serverless.replicas_min_ever

    def units(self) -> Iterator[tuple[str, tuple[Engine, ...]]]:
        """What wakes and sleeps as one, by its name in the file: a replica, or both halves of a pair."""
        for replica in self.replicas:
            yield replica.name, (replica,)
        for pair in self.pairs:
            yield pair.name, (pair.prefill, pair.decode)


class Deployment(_Table):
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
        engines = {replica.region for model in self.models for replica in model.replicas}
        engines |= {pair.region for model in self.models for pair in model.pairs}
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
