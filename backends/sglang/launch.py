"""The exact command line and environment of each SGLang server that a deployment file asks for. Pure.

`pagegate engine command` prints them and `pagegate engine up` runs them. Flags are those of SGLang 0.5.23; a test
runs them through its own parser. Why a flag is there stands beside it.
"""

import shlex
from dataclasses import dataclass

from backends.engine_tables import Engine, Launch, Program, Role
from backends.halves import Handover
from backends.local_command import local_command
from backends.topology import Model

_TOOL_PARSER = "--tool-call-parser"


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How one engine is started. name: as in the deployment file, such as `a` or `b-prefill`. port: host and port."""

    name: str
    role: Role
    program: Program
    port: str
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]

    def as_process(self) -> tuple[str, ...]:
        """To execute: `env` sets the variables and becomes the engine, under the same process id."""
        return ("env", *(f"{name}={value}" for name, value in self.environment), *self.argv)

    def as_shell(self) -> str:
        """To paste into a shell: a line a flag."""
        lines: list[str] = []
        for word in self.argv[3:]:
            if word.startswith("--") or not lines:
                lines.append(shlex.quote(word))
            else:
                lines[-1] += f" {shlex.quote(word)}"
        start = shlex.join(self.argv[:3])
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " \\\n  ".join([*variables, start, *lines])


def engine_commands(model: Model) -> list[EngineCommand]:
    """Of all engines of the model that are launched, not attached to."""
    handovers = model.handovers()
    commands = []
    for name, role, engine in model.engines():
        launch = engine.launch
        if launch is None:
            continue
        if launch.program == "local":
            argv = local_command(model, engine.weights, launch, role, handovers.get(name))
            environment = tuple(launch.environment.items())
        else:
            argv = (*_program(launch), *_flags(model, engine, launch, role, handovers.get(name)))
            environment = _environment(model, launch)
        port = f"{launch.host}:{launch.port}"
        commands.append(EngineCommand(name, role, launch.program, port, argv, environment))
    return commands


def _program(launch: Launch) -> tuple[str, ...]:
    return (launch.python, "-m", "sglang.launch_server")


def _flags(model: Model, engine: Engine, launch: Launch, role: Role, handover: Handover | None) -> list[str]:
    flags = [
        *_weights(model, engine),
        *("--host", launch.host, "--port", str(launch.port)),
        *_cache(model),
        *_parallelism(launch),
        *_sizes(launch),
        *_sleep(model),
        # Admission needs both: load and page counts from /metrics, cached tokens (billed at their own price) in usage.
        *("--enable-metrics", "--enable-cache-report"),
        # SGLang starts with 0.7 x this as its guess of how much of every output will be used: see `Launch`.
        *("--schedule-conservativeness", str(launch.schedule_conservativeness)),
    ]
    if handover is not None:
        flags += _disaggregation(handover, role)
    return [*flags, *launch.extra]


def _weights(model: Model, engine: Engine) -> list[str]:
    weights = engine.weights
    flags = ["--model-path", weights.checkpoint]
    if str(model.tokenizer) != weights.checkpoint:
        # Prompts come as token ids of this tokenizer; stop strings and output text must be of the same one.
        flags += ["--tokenizer-path", str(model.tokenizer)]
    flags += ["--served-model-name", model.id]
    if weights.quantization is not None:
        flags += ["--quantization", weights.quantization]
    if weights.kv_scales is not None:
        flags += ["--quantization-param-path", str(weights.kv_scales)]
    return flags


def _cache(model: Model) -> list[str]:
    return [
        *("--kv-cache-dtype", model.kv_cache_dtype),
        *("--page-size", str(model.page_tokens)),
        *("--context-length", str(model.limits.context_tokens)),
    ]


def _parallelism(launch: Launch) -> list[str]:
    flags: list[str] = []
    for name, ways in (
        ("--tp-size", launch.tensor_parallel),
        ("--pp-size", launch.pipeline_parallel),
        ("--dp-size", launch.data_parallel),
        ("--ep-size", launch.expert_parallel),
    ):
        if ways > 1:
            flags += [name, str(ways)]
    return flags


def _sizes(launch: Launch) -> list[str]:
    flags: list[str] = []
    for name, size in (
        ("--mem-fraction-static", launch.memory_fraction),
        ("--max-total-tokens", launch.total_tokens_max),
        ("--max-running-requests", launch.running_requests_max),
        ("--chunked-prefill-size", launch.prefill_chunk_tokens),
    ):
        if size is not None:
            flags += [name, str(size)]
    return flags


def _sleep(model: Model) -> list[str]:
    """For an engine that is to give up its memory: without the copy of its weights it would wake with none of them."""
    if model.serverless is None or model.serverless.depth != "released":
        return []
    return ["--enable-memory-saver", "--enable-weights-cpu-backup"]


def _disaggregation(handover: Handover, role: Role) -> list[str]:
    flags = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", handover.transfer]
    if handover.bootstrap_port is not None:
        flags += ["--disaggregation-bootstrap-port", str(handover.bootstrap_port)]
    return flags


def _environment(model: Model, launch: Launch) -> tuple[tuple[str, str], ...]:
    variables = {
        # Checked by SGLang for each request that it starts: see `Launch.reserved_output_tokens_max`.
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(launch.reserved_output_tokens_max),
        # A probe of /health would run a generation of its own, which nobody pays for and which waits behind others.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if model.page_tags:
        # Wakes the plugin (plugin.py), which SGLang finds by its entry point.
        variables["PAGEGATE_PAGE_TAGS"] = "1"
    if _TOOL_PARSER in launch.extra:
        # A call's arguments are of its tool's schema, also where the tool is not `strict`: as at the local engine.
        variables["SGLANG_TOOL_STRICT_LEVEL"] = "2"
    if launch.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus))
    return tuple((variables | launch.environment).items())
