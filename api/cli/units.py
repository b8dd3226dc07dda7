"""`pagegate engine ls|wake|sleep|drain`: which engines are awake, and what an operator orders of them.

They work on the database, so that they work from any machine that reaches it; whoever owns a unit hears within half a
second. engine.py mounts them.
"""

import time
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated

import typer

from api.cli.session import AsJson, Session, open_session, print_rows
from api.console.units import unit_fields
from api.lifecycle import unit_store
from api.settings import load_settings
from gateway.errors import ReplicaNotFound
from gateway.lifecycle.orders import Order, give_order
from gateway.lifecycle.states import Depth, Record
from gateway.lifecycle.store import UnitStore
from tenancy.audit_log import COMMAND_LINE

ModelId = Annotated[str, typer.Argument(metavar="MODEL", help="A model's id.", show_default=False)]
Unit = Annotated[str | None, typer.Argument(metavar="[UNIT]", help="A replica or pair of it; all if left out.")]


def ls(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Of this model alone.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the engines that gateways wake and let sleep: state, what is wished and by whom, and why one failed."""
    with open_session() as session:
        found = [record for record in _store(session).all() if model in {None, record.unit.model}]
    _print(found, as_json=as_json)


def wake(model: ModelId, unit: Unit = None, *, as_json: AsJson = False) -> None:
    """Wake them, also after `drain` and after failures."""
    _order(Order.WAKE, model, unit, as_json=as_json)


def sleep(
    model: ModelId,
    unit: Unit = None,
    *,
    release: Annotated[
        bool, typer.Option("--release", help="Keep the process, and give up its memory alone, where the engine can.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Let what runs there end, then stop them, until a request needs one."""
    _order(Order.SLEEP, model, unit, depth=Depth.RELEASED if release else Depth.STOPPED, as_json=as_json)


def drain(model: ModelId, unit: Unit = None, *, as_json: AsJson = False) -> None:
    """As sleep, and they stay so until `wake`, whoever needs them."""
    _order(Order.DRAIN, model, unit, as_json=as_json)


def _order(order: Order, model: str, unit: str | None, *, as_json: bool, depth: Depth = Depth.STOPPED) -> None:
    with open_session() as session:
        try:
            found = give_order(_store(session), order, model, unit, by=COMMAND_LINE, depth=depth)
        except ReplicaNotFound:
            named = f"unit {unit} of {model}" if unit else f"unit of {model}"
            raise typer.BadParameter(f"there is no {named}; `pagegate engine ls` lists them") from None
    _print(found, as_json=as_json)


def _print(records: Sequence[Record], *, as_json: bool) -> None:
    """A line each: why one failed may be long, and is not to be folded."""
    now_ns = time.time_ns()
    rows = [unit_fields(record, now_ns) for record in records]
    if as_json:
        print_rows("Units", rows, columns=(), as_json=True)
        return
    if not rows:
        typer.echo("There is no unit: no gateway has started one of its deployment here.")
    width = max((len(row["unit"]) for row in rows), default=0)
    for model, of_model in groupby(rows, key=itemgetter("model")):
        typer.echo(model)
        for row in of_model:
            typer.echo(f"  {row['unit']:{width}}  {row['told']}")


def _store(session: Session) -> UnitStore:
    return unit_store(load_settings(), session.database)
