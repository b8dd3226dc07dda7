"""The units whose engine processes this gateway starts itself: those of the local engine. Used by lifecycle.py, and by
the supervisor of several workers.
"""

from collections.abc import Iterator
from datetime import datetime

from api.settings import Settings
from backends.client import EngineClient
from backends.connections import EngineSession
from backends.drivers.processes import Ports, ProcessesDriver
from backends.sglang.launch import EngineCommand, engine_commands
from backends.topology import Deployment, Model
from gateway.lifecycle.keeper import Wanted
from gateway.lifecycle.states import Unit, Wish


def launched_units(
    deployment: Deployment, settings: Settings, session: EngineSession, ports: Ports, *, place: str, at: datetime
) -> dict[Unit, Wanted]:
    """What a keeper is to look after. place: of this gateway's data folder. at: now, in UTC."""
    wanted = {}
    for model in deployment.models:
        commands, engines = started_here(model, settings.region), {name: engine for name, _, engine in model.engines()}
        for name, wish in _wishes(model, at):
            if found := commands[name]:
                clients = {
                    command.name: EngineClient(engines[command.name].base_url, session, settings.backends)
                    for command in found
                }
                driver = ProcessesDriver(found, clients, settings.home, ports)
                wanted[Unit(model.id, name, place)] = Wanted(driver, wish, driven_by=found)
    return wanted


def started_here(model: Model, region: str) -> dict[str, tuple[EngineCommand, ...]]:
    """By replica and pair, the engines of it that this gateway starts. region: its own; others are started there."""
    local = {command.name: command for command in engine_commands(model) if command.program == "local"}
    engines: dict[str, tuple[str, ...]] = {replica.name: (replica.name,) for replica in model.replicas}
    engines |= {pair.name: (f"{pair.name}-prefill", f"{pair.name}-decode") for pair in model.pairs}
    regions = {replica.name: replica.region for replica in model.replicas} | {p.name: p.region for p in model.pairs}
    away = {name for name, elsewhere in regions.items() if elsewhere not in {None, region}}
    return {
        name: () if name in away else tuple(local[engine] for engine in found if engine in local)
        for name, found in engines.items()
    }


def _wishes(model: Model, at: datetime) -> Iterator[tuple[str, Wish]]:
    """A model that may sleep begins with as many units as are to be awake in any case."""
    serverless = model.serverless
    names = [*(replica.name for replica in model.replicas), *(pair.name for pair in model.pairs)]
    awake = len(names) if serverless is None else serverless.replicas_min_at(at)
    for index, name in enumerate(names):
        yield name, Wish.AWAKE if index < awake else Wish.ASLEEP
