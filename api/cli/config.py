"""`pagegate config check [FILE]`: the settings in force, or what a deployment file deploys, or what is wrong."""

import re
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer
from rich.console import Console
from rich.table import Table
from sqlalchemy.engine import make_url

from api.settings import Settings, load_settings
from backends.serverless import Serverless
from backends.topology import Deployment, read_deployment

_PASSWORD: Final = re.compile(r"(://[^:@/]*:)[^@]*@")

app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at the configuration."""


@app.command()
def check(
    file: Annotated[Path | None, typer.Argument(help="A deployment file; without it the settings are checked.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read the environment and the settings file as `serve` would, and print what is in force, passwords left out. With
    FILE: read that deployment file, and print its engines.
    """
    if file is not None:
        _show_deployment(read_deployment(file), as_json=as_json)
        return
    settings = load_settings()
    effective = _redacted(settings)
    if as_json:
        typer.echo(orjson.dumps(effective, option=orjson.OPT_INDENT_2).decode())
        return
    table = Table("setting", "value", title="Effective settings")
    for name, value in _flat(effective):
        table.add_row(name, value)
    Console().print(table)


def _show_deployment(deployment: Deployment, *, as_json: bool) -> None:
    if as_json:
        typer.echo(orjson.dumps(deployment.model_dump(mode="json", by_alias=True), option=orjson.OPT_INDENT_2).decode())
        return
    table = Table("model", "engine", "role", "url", "weights", "KV cache", title="Deployment")
    for model in deployment.models:
        cache = f"{model.kv_cache_dtype}, pages of {model.page_tokens}{', tags' if model.page_tags else ''}"
        for name, role, engine in model.engines():
            by = " by serve" if model.gateway_launches(engine) else ""
            how = f" (launched{by})" if engine.launch else ""
            table.add_row(model.id, name, role, engine.base_url + how, engine.weights.precision, cache)
    Console().print(table)
    for model in deployment.models:
        if model.serverless is not None:
            typer.echo(f"{model.id} {_sleeps(model.serverless)}")
        if (rollout := model.rollout) is not None:
            typer.echo(
                f"{model.id} tries {rollout.revision} beside {model.old_revision} with {rollout.share_percent:g} %"
            )
    for machine in deployment.machines:
        housed = [
            f"{name} of {model.id} ({taken / 1024:g} GiB)"
            for model in deployment.models
            for name, memory in deployment.housed(model).items()
            if (taken := max((size for pool, size in memory.items() if pool in machine.pools()), default=0))
        ]
        each = f" on each of {machine.gpus} GPUs" if machine.gpus else ""
        typer.echo(f"{machine.name} has {machine.memory_gib:g} GiB{each} for {', '.join(housed) or 'nobody'}")


def _sleeps(serverless: Serverless) -> str:
    """What the table of one model says, as a sentence."""
    awake = f"{serverless.replicas_min} to {serverless.replicas_max or 'all'} replicas awake"
    times = [
        f"at least {schedule.replicas_min} on {schedule.days} {schedule.begins}-{schedule.ends} UTC"
        for schedule in serverless.schedules
    ]
    return ", ".join([f"sleeps ({serverless.depth}) after {serverless.idle_seconds:g} s idle", awake, *times])


def _redacted(settings: Settings) -> dict[str, Any]:
    values = settings.model_dump(mode="json", by_alias=True)
    values["database_url"] = make_url(values["database_url"]).render_as_string(hide_password=True)
    for name in ("meters_url", "pages_url"):
        values[name] = _PASSWORD.sub(r"\1***@", values[name])
    return values


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, "" if value is None else str(value)))
    return rows
