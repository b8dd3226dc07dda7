"""`pagegate top`: replicas, holds, queues and the forecast of a running service, live in the terminal.

Reads GET /console/v1/capacity with an admin key, by default the one of bootstrap.json; it has no other way in.
"""

import asyncio
import json
import time
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from api.settings import load_settings

_TIMEOUT_S = 5.0
_BAR_CELLS = 24
_RELEASES_SHOWN = 6


class TopFailed(Exception):
    """The service can't be asked: one sentence for the terminal."""


def top_command(
    *,
    url: Annotated[str | None, typer.Option(help="Where the service is.", show_default="of bootstrap.json")] = None,
    key: Annotated[str | None, typer.Option(help="An admin key.", show_default="of bootstrap.json")] = None,
    every_s: Annotated[float, typer.Option("--every", min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
) -> None:
    """Show capacity, holds, queues and when pages come free, until interrupted."""
    try:
        asyncio.run(_show(*_where(url, key), every_s=every_s, once=once))
    except TopFailed as error:
        typer.echo(f"pagegate: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _where(url: str | None, key: str | None) -> tuple[str, str]:
    """The service's address and an admin key, from the options or from the data folder."""
    if url and key:
        return url.rstrip("/"), key
    path = load_settings().bootstrap_path
    try:
        known: dict[str, str] = json.loads(path.read_text())
        return (url or known["base_url"]).rstrip("/"), key or known["admin_key"]
    except (OSError, ValueError, KeyError) as error:
        raise TopFailed(f"{path} does not say where the service is: name --url and --key.") from error


async def _show(url: str, key: str, *, every_s: float, once: bool) -> None:
    console = Console()
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers={"Authorization": f"Bearer {key}"}) as session:
        picture = render(await _capacity(session, url))
        if once:
            console.print(picture)
            return
        with Live(picture, console=console, screen=True, auto_refresh=False) as live:
            while True:
                began = time.monotonic()
                await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))
                live.update(render(await _capacity(session, url)), refresh=True)


async def _capacity(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        async with session.get(f"{url}/console/v1/capacity") as response:
            if response.status != 200:
                raise TopFailed(f"{url} answers {response.status}: an admin key is needed.")
            found: dict[str, Any] = await response.json()
            return found
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise TopFailed(f"{url} does not answer: {error or type(error).__name__}.") from error


def render(capacity: dict[str, Any]) -> RenderableType:
    """One screen of the answer."""
    return Group(*(part for model in capacity["models"] for part in _model(model)))


def _model(model: dict[str, Any]) -> list[RenderableType]:
    queued = model["engine_queued"] / model["admitted"] if model["admitted"] else 0.0
    title = (
        f"{model['model']} · {model['waiting_for_pages']} waiting, {model['kept_places']} places kept · "
        f"{model['admitted']} let in, {queued:.1%} of them queued inside · forecast covered "
        f"{model['forecast_covered_share']:.2%} of {model['forecast_decisions']} · step {model['step_ms']:.1f} ms"
    )
    replicas = Table(title=title, title_justify="left", expand=False)
    for name in (
        "replica",
        "region",
        "standing",
        "in use",
        "held",
        "used",
        "pages",
        "runs",
        "peak",
        "drift",
        "free in",
    ):
        replicas.add_column(name, justify="left" if name in {"replica", "region", "standing", "in use"} else "right")
    for replica in model["replicas"]:
        replicas.add_row(*_replica(replica))
    if not model["waiting"]:
        return [replicas]
    waiting = Table(title="waiting", title_justify="left")
    for name in ("account", "tier", "weight", "requests", "tokens", "first waits", "served"):
        waiting.add_column(name, justify="left" if name == "account" else "right")
    for row in model["waiting"]:
        waiting.add_row(
            row["account_id"],
            str(row["tier"]),
            f"{row['weight_percent']} %",
            str(row["requests"]),
            f"{row['prompt_tokens']:,}",
            f"{row['first_waits_ms'] / 1000:.1f} s",
            f"{row['served_s']:.1f} s",
        )
    return [replicas, waiting]


def _replica(replica: dict[str, Any]) -> list[str]:
    seen, forecast = replica["reported"], replica["forecast"]
    if seen is not None and replica["prompts"] is not None:
        return [
            replica["id"],
            replica["region"],
            replica["standing"],
            _bar(seen["used_pages"] / max(1, seen["total_pages"])),
            str(replica["held_pages"]),
            str(seen["used_pages"]),
            str(seen["total_pages"]),
            f"{seen['running']}+{seen['waiting']}",
            *["–"] * 2,
            f"{replica['prompts']['computed_in_s']:.1f} s",
        ]
    if seen is None or forecast is None:
        return [replica["id"], replica["region"], replica["standing"], "", str(replica["held_pages"]), *["–"] * 6]
    used = 1 - forecast["free_tokens"] / max(1, forecast["total_tokens"])
    release = ", ".join(
        f"{seconds:.0f} s {1 - tokens / max(1, forecast['total_tokens']):.0%}"
        for seconds, tokens in forecast["release"][-_RELEASES_SHOWN:][::2]
    )
    return [
        replica["id"],
        replica["region"],
        replica["standing"],
        _bar(used),
        str(replica["held_pages"]),
        str(seen["used_pages"]),
        str(seen["total_pages"]),
        f"{seen['running']}+{seen['waiting']}",
        f"{forecast['peak_tokens'] / max(1, forecast['total_tokens']):.0%}",
        str(forecast["drift_tokens"]),
        release or "now",
    ]


def _bar(share: float) -> str:
    cells = round(_BAR_CELLS * min(1.0, max(0.0, share)))
    return "█" * cells + "░" * (_BAR_CELLS - cells) + f" {share:.0%}"
