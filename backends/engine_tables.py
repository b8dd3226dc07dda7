"""The tables of one engine in a deployment file: its weights, how it is started or where it is attached to.

topology.py reads the file; halves.py has what several engines make together. Does no network and starts nothing.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from backends.managed import Managed

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
_Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
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


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Weights(Table):
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


class Launch(Table):
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


class Engine(Table):
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
    machine: Name | None = Field(default=None, description="The one of [[machines]] that it lives on.")
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
