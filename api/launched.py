"""The units that this gateway starts: processes of its own, and engines of which the file names a manager.

The local engine is always a process of the gateway. SGLang is where its model may sleep (`[models.serverless]`), since
somebody has to wake it; else `pagegate engine up` keeps it running, and a gateway's restart loads no weights again.

Used by lifecycle.py, and by the supervisor of several workers.
"""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from api.settings import Settings
from backends.client import EngineClient
from backends.connections import EngineSession
from backends.drivers.managed import ManagedDriver, ManagedEngine
from backends.drivers.processes import Ports, ProcessesDriver
from backends.drivers.switches import Switches
from backends.engine_tables import Engine, Role
from backends.sglang.launch import EngineCommand, engine_commands
from backends.topology import Deployment, Model
from gateway.lifecycle.book import Wanted
from gateway.lifecycle.states import Unit, Wish


def launched_units(
    deployment: Deployment,
    settings: Settings,
    session: EngineSession,
    ports: Ports,
    switches: Switches,
    *,
    place: str,
    at: datetime,
) -> dict[Unit, Wanted]:
    """What a keeper is to look after. place: of this gateway's data folder. at: now, in UTC."""
    wanted = {}
    for model in deployment.models:
        engines = {name: engine for name, _, engine in model.engines()}
        clients = {name: EngineClient(one.base_url, session, settings.backends) for name, one in engines.items()}
        commands, here = started_here(model, settings.region), engines_here(model, settings.region)
        for name, wish in _wishes(model, at):
            launched = commands[name]
            managed = tuple((engine, one) for engine in here[name] if (one := engines[engine].managed) is not None)
            if launched:
                driver = ProcessesDriver(launched, clients, settings.home, ports)
                wanted[Unit(model.id, name, place)] = Wanted(driver, wish, driven_by=launched)
            elif managed:
                made = ManagedDriver([ManagedEngine(one, switches.of(by), clients[one]) for one, by in managed])
                # Any gateway can scale a workload of the cluster; a unit of systemd only the one on its machine.
                shared = all(by.kubernetes is not None for _, by in managed)
                wanted[Unit(model.id, name, "" if shared else place)] = Wanted(made, wish, driven_by=managed)
    return wanted


def units_elsewhere(deployment: Deployment, region: str) -> frozenset[tuple[str, str]]:
    """Models and names of the units that gateways of other regions start beside themselves. region: one's own."""
    return frozenset(
        (model.id, name)
        for model in deployment.models
        for name, engines in model.units()
        if not engines_here(model, region)[name] and any(map(_is_beside, engines))
    )


def _is_beside(engine: Engine) -> bool:
    """Is it a process of its gateway's own machine?"""
    return engine.launch is not None or (engine.managed is not None and engine.managed.systemd is not None)


def started_here(model: Model, region: str) -> dict[str, tuple[EngineCommand, ...]]:
    """By unit, the engines of it that are processes of this gateway. region: its own."""
    ours = {name for name, _, engine in model.engines() if model.gateway_launches(engine)}
    commands = {found.name: found for found in engine_commands(model) if found.name in ours}
    here = engines_here(model, region)
    return {name: tuple(commands[engine] for engine in found if engine in commands) for name, found in here.items()}


def engines_here(model: Model, region: str) -> dict[str, tuple[str, ...]]:
    """By unit, the engines of it that are started in this region; none of others."""
    engines: dict[str, tuple[str, ...]] = {}
    for replica in model.replicas:
        engines[replica.name] = (replica.name,) if replica.region in {None, region} else ()
    for sides in model.sides():
        for half in (*sides.prefill, *sides.decode):
            ours = (half.name,) if sides.region in {None, region} else ()
            engines[half.unit] = engines.get(half.unit, ()) + ours
    return engines


def _wishes(model: Model, at: datetime) -> Iterator[tuple[str, Wish]]:
    """A model that may sleep begins with as many units, of a group as many of each side, as are to be awake anyhow."""
    roles = model.roles()
    awake = len(roles) if model.serverless is None else model.serverless.replicas_min_at(at)
    begun: Counter[Role] = Counter()
    for name, role in roles.items():
        yield name, Wish.AWAKE if begun[role] < awake else Wish.ASLEEP
        begun[role] += 1
