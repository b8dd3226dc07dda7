"""How `pagegate replay` prints a day of engines that grow, and fleets: a line a figure, or one JSON document."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from api.cli.session import print_record
from gateway.replay.day_trials import DayReport
from gateway.replay.fleets import run_fleet
from gateway.replay.profiles import FLEETS, PROFILES
from gateway.replay.traces import TraceRow


def print_days(reports: Sequence[DayReport], about: Mapping[str, object], *, as_json: bool) -> None:
    """about: what was played."""
    if as_json:
        print_record("Replay", {**about, "policies": [asdict(each) for each in reports]}, as_json=True)
        return
    _print_table(about, [(each.policy, asdict(each)) for each in reports], without="policy")


def print_fleets(
    rows: Sequence[TraceRow], fleets: Sequence[int], profile: str, *, about: Mapping[str, object], as_json: bool
) -> None:
    """Each is played by reports alone and with a board. rows: the trace that sizes are drawn from."""
    seed = about["seed"]
    assert isinstance(seed, int), "an option of the command"
    reports = [
        run_fleet(rows, fleet, PROFILES[profile], seed=seed, clock_ns=time.thread_time_ns)
        for count in fleets
        for fleet in (replace(FLEETS[count], claim_s=None), FLEETS[count])
    ]
    if as_json:
        print_record("Replay", {**about, "fleets": [asdict(each) for each in reports]}, as_json=True)
        return
    _print_table(about, [(str(each.replicas), asdict(each)) for each in reports], without="replicas")


def _print_table(
    about: Mapping[str, object], columns: Sequence[tuple[str, Mapping[str, float]]], *, without: str
) -> None:
    table = Table(title=", ".join(f"{name} {what}" for name, what in about.items()))
    table.add_column("figure" if without == "policy" else without)
    for title, _ in columns:
        table.add_column(title, justify="right")
    for name in (name for name in columns[0][1] if name != without):
        table.add_row(name, *(_text(figures[name]) for _, figures in columns))
    Console().print(table)


def _text(value: float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
