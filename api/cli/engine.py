"""`pagegate engine command|up|check`: how the engines of a deployment file are started, starting them, and whether
running ones are what the file says. `api/cli/main.py` mounts `app`, which has the commands of units.py as well.
"""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer

from api.cli import units
from backends.errors import BackendError
from backends.sglang.attach import contradictions
from backends.sglang.launch import EngineCommand, engine_commands
from backends.sglang.probe import read_reports
from backends.supervision import EngineProcess
from backends.topology import DeploymentInvalid, Model, read_deployment

app = typer.Typer(help="The engines of a deployment file.", no_args_is_help=True)
for _of_units in (units.ls, units.wake, units.sleep, units.drain):
    app.command()(_of_units)

ModelId = Annotated[str, typer.Argument(metavar="MODEL", help="Id of a model in the file.")]
DeploymentFile = Annotated[Path, typer.Option("--deployment", "-d", help="The deployment file (TOML).")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


@app.command()
def command(model: ModelId, *, deployment: DeploymentFile, as_json: AsJson = False) -> None:
    """Print the exact command line of each engine that is launched, prefill and decode of a pair included."""
    commands = engine_commands(read_deployment(deployment).model(model))
    if as_json:
        rows = [{"name": c.name, "role": c.role, "argv": c.argv, "environment": dict(c.environment)} for c in commands]
        typer.echo(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return
    for found in commands:
        typer.echo(f"# {found.name} ({found.role})\n{found.as_shell()}\n")
    if not commands:
        typer.echo(f"# {model}: all engines are attached to by url, none is launched")


@app.command()
def up(
    model: ModelId,
    *,
    deployment: DeploymentFile,
    engine: Annotated[
        str | None, typer.Option(help="One engine, such as a-prefill; without it all of the model.")
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="Folder for the engines' logs.", file_okay=False)] = Path(),
    drain_s: Annotated[float, typer.Option(min=0, max=86400, help="Running requests' time to end at a stop.")] = 600.0,
) -> None:
    """Run the engines that the file launches until SIGTERM or Ctrl-C. One that dies is started again, with growing
    pauses. At a stop each gets SIGTERM, after which SGLang ends what is running; it is killed when its time is over.
    Engines of a model with [models.serverless] are refused: `pagegate serve` starts and stops them.
    """
    found_model = read_deployment(deployment).model(model)
    if found_model.serverless is not None:
        raise DeploymentInvalid(f"{model} has [models.serverless]: `pagegate serve` starts and stops its engines")
    commands = [found for found in engine_commands(found_model) if engine is None or found.name == engine]
    if not commands:
        raise DeploymentInvalid(f"{model} launches no engine" + (f" named {engine}" if engine else ""))
    log_dir.mkdir(parents=True, exist_ok=True)
    asyncio.run(_supervise(commands, log_dir, drain_s))


async def _supervise(commands: Sequence[EngineCommand], log_dir: Path, drain_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                EngineProcess(found.name, found.as_process(), log_dir / f"{found.name}.log", stop_s=drain_s).run(),
                name=f"engine {found.name}",
            )
            for found in commands
        ]
        await stop.wait()
        for task in tasks:
            task.cancel()


@app.command()
def check(
    model: ModelId,
    *,
    deployment: DeploymentFile,
    within_s: Annotated[float, typer.Option(min=0.1, max=300, help="Seconds for each report.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Ask each engine of the model what it is; exit code 1 if one can't be reached or contradicts the file."""
    faults = asyncio.run(_faults(read_deployment(deployment).model(model), within_s))
    if as_json:
        typer.echo(orjson.dumps(faults, option=orjson.OPT_INDENT_2).decode())
    else:
        for name, sentences in faults.items():
            for sentence in sentences or ["as the file says"]:
                typer.echo(f"{name}: {sentence}")
    if any(faults.values()):
        raise typer.Exit(1)


async def _faults(model: Model, within_s: float) -> dict[str, list[str]]:
    """By engine; empty lists are engines that may serve."""
    faults: dict[str, list[str]] = {}
    for name, role, engine in model.engines():
        try:
            reports = await read_reports(engine.base_url, within_s=within_s)
        except BackendError as error:
            faults[name] = [error.message]
        else:
            faults[name] = contradictions(model, role, engine, reports)
    return faults
